"""Stage `eval`: prompts and turns, choosing between checkpoints, the losslessness check, what is published."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import load_target
from fledge.errors import FledgeError
from fledge.evaluation import acceptance
from fledge.evaluation.acceptance import AcceptanceMeter, Measurement, TargetTurn
from fledge.evaluation.baseline import Baseline
from fledge.evaluation.conversations import Skipped
from fledge.evaluation.results import RequestRecord
from fledge.models.drafter.variants import EAGLE_3_1
from fledge.progress import Progress
from fledge.training.pipeline import StageContext
from fledge.training.recipe import Recipe
from fledge.training.stages import evaluate
from tests.tiny_models import make_drafter
from tests.tiny_training import write_run

USER = {"role": "user", "content": "the cat"}
HELD_OUT = [
    {"messages": [USER], "category": "a", "prompt_token_ids": [1, 2]},
    {"messages": [USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": "and"}], "category": "b"},
    {"messages": [], "category": "b", "prompt_token_ids": [10, 11, 12]},
]


@pytest.fixture(name="context")
def _context(tmp_path: Path) -> StageContext:
    """As the pipeline would call the stage: two random candidates, three held-out prompts."""
    recipe = Recipe.load(write_run(tmp_path, eval={"max_tokens": 6, "max_prompts": 8}, fit={"depth": 2}))
    inputs = {name: tmp_path / name for name in ("prepare", "fit")}
    inputs["prepare"].mkdir()
    records = [{"prompt_token_ids": [], **record} for record in HELD_OUT]
    (inputs["prepare"] / "held_out.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    target = load_target(Path(recipe.target.path))
    for seed, name in enumerate(["step-000004", "step-000008"]):
        drafter = make_drafter(EAGLE_3_1.config_for(target.config), target, seed=seed)
        save_drafter(drafter, inputs["fit"] / "candidates" / name, provenance={"step": seed})
    (inputs["fit"] / "training.png").write_bytes(b"png")
    directory = tmp_path / "eval"
    directory.mkdir()
    return StageContext(recipe=recipe, directory=directory, inputs=inputs, progress=Progress(quiet=True))


def with_eval(context: StageContext, **values: Any) -> StageContext:
    return replace(context, recipe=replace(context.recipe, eval=replace(context.recipe.eval, **values)))


def measurement(turns: Sequence[TargetTurn], depth: int, accepted: int, *different: tuple[int, int]) -> Measurement:
    """As if every turn had five rounds of `depth` drafts, of which `accepted` stood."""
    requests = [
        RequestRecord(prompt=turn.prompt, sent=0.0, output_tokens=1, acceptance=((depth, accepted, 5),))
        for turn in turns
    ]
    return Measurement(requests=tuple(requests), different=different, seconds=0.0)


def test_it_publishes_the_best_candidate_unchanged(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"step-000004": 2, "step-000008": 1}
    used: dict[str, Any] = {}

    def set_drafter(_meter: AcceptanceMeter, drafter: Path | None, depth: int = 0) -> None:
        used.update(drafter=drafter, depth=depth)

    def measure(_meter: AcceptanceMeter, turns: list[TargetTurn], *_: object) -> Measurement:
        return measurement(turns, used["depth"], lengths[used["drafter"].name])

    monkeypatch.setattr(AcceptanceMeter, "set_drafter", set_drafter)
    monkeypatch.setattr(AcceptanceMeter, "measure", measure)
    summary = evaluate.run(context)
    assert summary["best"] == "step-000004"
    assert summary["acceptance_length"] == 3.0
    assert summary["by_category"] == {name: {"2": 3.0, "4": 3.0} for name in "ab"}
    chosen, published = context.inputs["fit"] / "candidates" / "step-000004", context.directory / "drafter"
    for name in ("model.safetensors", "config.json"):
        assert (published / name).read_bytes() == (chosen / name).read_bytes()
    assert json.loads((published / "fledge_provenance.json").read_text())["step"] == 0  # what was there is kept
    assert (published / "training.png").read_bytes() == b"png"
    assert "step-000004 3.00, step-000008 2.00" in (published / "README.md").read_text()
    baseline = Baseline.read(published)
    assert baseline is not None
    assert [(cell.depth, cell.acceptance_length) for cell in baseline.cells] == [(2, 3.0), (4, 3.0)]
    assert baseline.rates(0.0, 2) == [1.0, 1.0]


def test_among_equals_the_last_one(context: StageContext) -> None:
    """Random drafters are never right on this target's habits, so both have length 1."""
    summary = evaluate.run(context)
    tried = json.loads((context.directory / "evaluation.json").read_text())["candidates"]
    assert tried == {"step-000004": 1.0, "step-000008": 1.0}
    assert summary["best"] == "step-000008"
    assert summary["different_answers"] == 0
    baseline = Baseline.read(context.directory / "drafter")
    assert baseline is not None
    assert [cell.fresh_acceptance_length for cell in baseline.cells] == list(summary["without_repetition"].values())
    assert {cell.repeated for cell in baseline.cells} == {summary["repeated"]} != {None}
    assert [cell.novel_acceptance_length for cell in baseline.cells] == list(summary["novel"].values())
    assert {cell.copied for cell in baseline.cells} == {summary["copied"]} != {None}


def test_held_out_prompts_are_conversations_or_ids(context: StageContext) -> None:
    prompts = evaluate.read_held_out(context.inputs["prepare"] / "held_out.jsonl")
    assert [prompt.num_turns for prompt in prompts] == [1, 2, 1]
    assert [prompt.token_ids for prompt in prompts] == [(), (), (10, 11, 12)]


def test_sources_are_read_as_data_is(context: StageContext, tmp_path: Path) -> None:
    lines = [
        {"category": "math", "messages": [USER, USER]},
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
        {"text": "once upon a time"},
        {"nothing": 1},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    skipped = Skipped()
    prompts = evaluate.read_source(path, skipped)
    assert [(prompt.category, prompt.num_turns) for prompt in prompts] == [("math", 2), ("mine", 1), ("mine", 1)]
    assert skipped.total == 1
    summary = evaluate.run(with_eval(context, sources=(str(path),)))
    assert set(summary["by_source"]) == {"mine"}
    assert set(summary["by_category"]) == {"math", "mine"}


def test_sources_of_the_same_name_are_all_measured(context: StageContext, tmp_path: Path) -> None:
    sources = [tmp_path / name / "test.jsonl" for name in ("one", "two")]
    for number, path in enumerate(sources):
        path.parent.mkdir()
        path.write_text(json.dumps({"prompt": f"hello {number}"}))
    summary = evaluate.run(with_eval(context, sources=tuple(map(str, sources))))
    assert set(summary["by_source"]) == {"one/test", "two/test"}


def test_a_part_measured_before_a_kill_is_not_measured_again(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluate.run(context)
    whole = (context.directory / "evaluation.json").read_bytes()
    (context.directory / "parts" / "depth-4-of-step-000008.json").unlink()
    loaded: list[object] = []
    measured: list[object] = []
    load, measure = acceptance.LLM, AcceptanceMeter.measure
    monkeypatch.setattr(acceptance, "LLM", lambda *a, **k: loaded.append(a) or load(*a, **k))
    monkeypatch.setattr(AcceptanceMeter, "measure", lambda *a: measured.append(a) or measure(*a))
    assert evaluate.run(context) == first
    assert (len(loaded), len(measured)) == (1, 1)
    assert (context.directory / "evaluation.json").read_bytes() == whole
    assert evaluate.run(context) == first
    assert (len(loaded), len(measured)) == (1, 1)  # all is known: not even the target is loaded


def test_the_target_is_loaded_once(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    load = acceptance.LLM
    monkeypatch.setattr(acceptance, "LLM", lambda *a, **k: loaded.append(a) or load(*a, **k))
    evaluate.run(context)
    assert len(loaded) == 1


def break_measure(monkeypatch: pytest.MonkeyPatch, turn_number: int, place: int) -> None:
    def measure(_meter: AcceptanceMeter, turns: list[TargetTurn], *_: object) -> Measurement:
        different = [(turn_number, place)] if len(turns) > turn_number else []
        return measurement(turns, 2, 0, *different)

    monkeypatch.setattr(AcceptanceMeter, "measure", measure)


def test_changed_text_is_an_error_in_float32(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    break_measure(monkeypatch, 0, 2)
    with pytest.raises(FledgeError, match="1 of 4 answers are not the target's own"):
        evaluate.run(context)
    assert not (context.directory / "drafter").exists()


def test_a_tie_may_fall_either_way(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    break_measure(monkeypatch, 0, 2)
    monkeypatch.setattr(acceptance, "TIE", 1e9)
    assert evaluate.run(context)["different_answers"] == 2


def test_bfloat16_counts_and_goes_on(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    break_measure(monkeypatch, 1, 0)
    monkeypatch.setattr(AcceptanceMeter, "dtype", "bfloat16")  # as on a GPU: a CPU computes in float32
    assert evaluate.run(context)["different_answers"] == 2
    assert "2 of 8 answers differ" in (context.directory / "drafter" / "README.md").read_text()


def test_switched_off_the_last_candidate_is_published(context: StageContext) -> None:
    summary = evaluate.run(with_eval(context, enabled=False))
    assert summary == {"evaluated": False, "best": "step-000008", "reason": "the recipe says eval.enabled: false"}
    card = (context.directory / "drafter" / "README.md").read_text()
    assert "Not evaluated: the recipe says eval.enabled: false." in card
    assert not (context.directory / "drafter" / "acceptance.png").exists()


def test_a_family_that_is_not_served_is_skipped_with_a_word(context: StageContext) -> None:
    path = Path(context.recipe.target.path) / "config.json"
    path.write_text(path.read_text().replace('"llama"', '"gemma7"'))
    summary = evaluate.run(context)
    assert not summary["evaluated"]
    assert "does not serve this target" in summary["reason"]
    assert "gemma7" in summary["reason"]


def test_without_prompts_it_says_what_to_do(context: StageContext) -> None:
    (context.inputs["prepare"] / "held_out.jsonl").write_text("")
    with pytest.raises(FledgeError, match=r"no prompts in it; raise data.held_out, or name eval.sources"):
        evaluate.run(context)


def test_the_key_follows_the_content_of_sources(context: StageContext, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "a"}')
    recipe = with_eval(context, sources=(str(path),)).recipe
    before = evaluate.settings(recipe)
    path.write_text('{"text": "b"}')
    assert evaluate.settings(recipe) != before
    assert evaluate.settings(replace(recipe, fit=replace(recipe.fit, depth=3))) != before


def test_sampled_answers_are_the_same_with_and_without_a_drafter(context: StageContext) -> None:
    summary = evaluate.run(with_eval(context, temperature=0.8))
    assert summary["different_answers"] == 0


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)
