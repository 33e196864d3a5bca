"""The suite on the real engine and probe, with tiny models."""

from dataclasses import replace
from pathlib import Path

import pytest

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.drift.figures import all_figures, check
from fledge.drift.laboratory import EngineLaboratory
from fledge.drift.perturb import UNPERTURBED
from fledge.drift.probe import ProbeSettings
from fledge.drift.segments import Conversation
from fledge.drift.suite import read_cell, read_suite, run_suite
from fledge.drift.workloads import Workload
from fledge.report.intervals import Bootstrap
from tests.tiny_models import TINY_TARGET, drafter_configs, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

TURNS = ({"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"})
WORKLOAD = Workload(
    name="small",
    conversations=(
        Conversation(id="single", messages=TURNS[:1]),
        Conversation(id="open", messages=TURNS),
        Conversation(id="long", messages=({"role": "user", "content": "Too long. " * 500},)),
    ),
)


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,), max_positions=2200)
    target = make_target(config)
    save_target(target, root / "target")
    save_tokenizer(root / "target")
    for name in ("eagle1", "eagle3.1"):
        save_drafter(make_drafter(drafter_configs(config)[name], target, seed=2), root / name)
    return root


def test_two_drafters_under_perturbations(pair: Path, tmp_path: Path) -> None:
    laboratory = EngineLaboratory(
        target=str(pair / "target"),
        workload="small",
        settings=ProbeSettings(depth=3, max_tokens=12),
        options={"device": "cpu"},
    )
    drafters = [str(pair / "eagle1"), str(pair / "eagle3.1")]
    names = ("template:llama3", "template-noise:0.3", "pad:1k", "pad:4k", "temperature:0.8")
    suite = run_suite(drafters, WORKLOAD, names, laboratory, tmp_path, bootstrap=Bootstrap(resamples=50))
    assert [drafter.variant for drafter in suite.drafters] == ["EAGLE-1/2", "EAGLE-3.1"]
    for drafter in drafters:
        assert list(suite.cell(drafter).left_out) == ["long"]
        assert suite.cell(drafter, "pad:4k:before").skip == "4096 tokens of padding do not fit into 2200 tokens"
        results = {
            name: read_cell(tmp_path, drafter, name).result for name in (UNPERTURBED, *names) if name != "pad:4k"
        }
        assert all(result.rounds > 0 for result in results.values())
        assert results["pad:1k"].prompt_tokens > results[UNPERTURBED].prompt_tokens + 2000
        assert results["template:llama3"].prompt_tokens > results[UNPERTURBED].prompt_tokens
        assert [results[name].temperature for name in (UNPERTURBED, "temperature:0.8")] == [0.0, 0.8]
    # Earlier turns have the target's own answers, the same for both drafters.
    lengths = [read_cell(tmp_path, drafter).result.prompt_tokens for drafter in drafters]
    assert lengths[0] == lengths[1] > 2 * len("<user>One?\n<assistant>") + len("Two?")
    measured = all_figures(read_suite(tmp_path))
    assert "top_layer_share" not in measured[drafters[0]]
    assert 0 < measured[drafters[1]]["top_layer_share"] < 1
    assert check(["al<1"], measured[drafters[1]]) == []

    retold = run_suite(drafters, WORKLOAD, names, laboratory, tmp_path, bootstrap=Bootstrap(resamples=50))
    assert retold == suite
    other = replace(laboratory, settings=ProbeSettings(depth=2, max_tokens=12))
    assert other.identity(drafters[0]) != laboratory.identity(drafters[0])
