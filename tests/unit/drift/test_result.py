"""Results as JSON and back."""

import json
from typing import Any

import pytest

from fledge.drift.result import (
    AnswerExample,
    AttentionMeans,
    Calibration,
    CalibrationBin,
    DepthMetrics,
    DriftResult,
    ExampleToken,
    FusionShare,
    HeadAttention,
    PromptRow,
)
from fledge.errors import ConfigError

ATTENTION = AttentionMeans(
    mass={"sink": 0.25, "drafted": 0.75}, recent=0.6, entropy=1.5, normalised_entropy=0.5, distance=3.25
)
CALIBRATION = Calibration(
    bins=(
        CalibrationBin(low=0.0, high=0.5, count=0, confidence=None, right=None),
        CalibrationBin(low=0.5, high=1.0, count=3, confidence=0.75, right=1.0),
    ),
    error=0.25,
)
DEPTH = DepthMetrics(
    depth=1,
    rounds=5,
    attention=ATTENTION,
    heads=(HeadAttention(layer=0, head=1, attention=ATTENTION),),
    uniform_mass={"sink": 0.1, "drafted": 0.9},
    hidden_rms=2.0,
    head_rms=1.0,
    feature_rms=2.0,
    hidden_growth=1.0,
    head_growth=1.0,
    feature_growth=1.0,
    confidence=0.5,
    acceptance=0.6,
    conditional_acceptance=None,
    reached=5,
    missed=2,
    missed_outside_vocabulary=1,
    head_cosine=None,
    feature_cosine=0.5,
    calibration=CALIBRATION,
)
RESULT = DriftResult(
    drafter="d",
    variant="EAGLE-3",
    norm_output=False,
    target="t",
    workload="w",
    perturbation=None,
    temperature=0.0,
    trained_depth=None,
    depth=2,
    engine_depth=1,
    prompts=1,
    prompt_tokens=10,
    output_tokens=20,
    recent_tokens=4,
    tally=((1, 0, 2), (2, 2, 3)),
    fresh_tally=((1, 0, 2), (2, 2, 1)),
    engine_tally=((1, 0, 2), (1, 1, 3)),
    by_depth=(DEPTH,),
    fused_rms=1.25,
    fusion_shares=(FusionShare(part="layer 2", share=1.0, norm=4.0),),
    calibration=CALIBRATION,
    prompt_rows=(
        PromptRow(
            id="a",
            category="c",
            prompt_tokens=10,
            output_tokens=20,
            repeated_tokens=8,
            copied_tokens=5,
            novel_tally=((1, 0, 1),),
            tally=((1, 0, 2), (2, 2, 3)),
            fresh_tally=((1, 0, 2), (2, 2, 1)),
            rounds_by_depth=(5, 3),
            recent_attention=(0.0, 0.5),
            sink_attention=(0.5, None),
        ),
    ),
    examples=(
        AnswerExample(
            id="a",
            category="c",
            acceptance_length=2.2,
            prompt="hi",
            tokens=(
                ExampleToken(text="x", status="own"),
                ExampleToken(text="y", status="outside", draft="z"),
            ),
        ),
    ),
)


def test_a_result_survives_json() -> None:
    written = json.dumps(RESULT.to_dict(), allow_nan=False)
    restored = DriftResult.from_dict(json.loads(written))
    assert restored == RESULT
    assert hash(restored.by_depth[0].calibration) == hash(CALIBRATION)  # tuples again, not lists
    assert json.dumps(restored.to_dict()) == written
    assert (restored.copied_share, restored.novel_acceptance.acceptance_length) == (0.25, 1.0)


def test_a_result_from_before_copies_were_told_can_be_read() -> None:
    values = RESULT.to_dict()
    for row in values["prompt_rows"]:
        del row["copied_tokens"], row["novel_tally"]
    older = DriftResult.from_dict(values)
    assert (older.copied_share, older.novel_acceptance.acceptance_length) == (None, None)
    assert older.fresh_acceptance == RESULT.fresh_acceptance


def test_figures_follow_from_the_tally() -> None:
    values = RESULT.to_dict()
    assert RESULT.acceptance.rounds == values["rounds"] == 5
    assert values["acceptance"]["acceptance_length"] == pytest.approx(1 + 6 / 5)
    assert values["fresh_acceptance"]["acceptance_length"] == pytest.approx(1 + 2 / 3)
    assert values["repeated_share"] == 0.4
    assert values["engine_acceptance"]["acceptance_length"] == pytest.approx(1 + 3 / 5)
    assert values["outside_vocabulary"] == RESULT.outside_vocabulary == 0.5
    row = values["prompt_rows"][0]
    assert (row["rounds"], row["drafted"], row["accepted"]) == (5, 8, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("tally"), "DriftResult: 'tally' is missing"),
        (lambda v: v["by_depth"][0].pop("heads"), r"DriftResult: 'by_depth\.heads' is missing"),
        (lambda v: v.update(calibration=3), r"DriftResult: calibration: found 3, expected an object"),
    ],
)
def test_what_is_no_result_is_refused(change: Any, message: str) -> None:
    values = json.loads(json.dumps(RESULT.to_dict()))
    change(values)
    with pytest.raises(ConfigError, match=message):
        DriftResult.from_dict(values)
