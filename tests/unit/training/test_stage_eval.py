"""Stage `eval`: prompts and turns, choosing between checkpoints, the losslessness check, what is published."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import load_target
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.errors import FledgeError
from fledge.evaluation.conversations import Skipped
from fledge.models.drafter.variants import EAGLE_3_1
from fledge.progress import Progress
from fledge.training import evaluation
from fledge.training.evaluation import Measurement, Question, Turn
from fledge.training.recipe import Recipe
from fledge.training.stages import evaluate
from fledge.training.workspace import StageContext
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


def test_it_publishes_the_best_candidate_unchanged(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"step-000004": 2, "step-000008": 1}

    def fake(llm: Path, turns: list[Turn], _recipe: Recipe, depth: int, _advance: Any) -> Measurement:
        statistics = AcceptanceStatistics()
        statistics.add(drafted=depth, accepted=lengths[llm.name], rounds=5)
        return Measurement(depth=depth, groups={("held-out", "a"): statistics}, tokens=len(turns), different={})

    real = evaluation.open_llm
    monkeypatch.setattr(evaluation, "measure", fake)
    monkeypatch.setattr(evaluation, "open_llm", lambda recipe, drafter=None, _depth=0: drafter or real(recipe))
    summary = evaluate.run(context)
    assert summary["best"] == "step-000004"
    assert summary["acceptance_length"] == 3.0
    assert summary["by_category"] == {"a": {"2": 3.0, "4": 3.0}}
    chosen, published = context.inputs["fit"] / "candidates" / "step-000004", context.directory / "drafter"
    for name in ("model.safetensors", "config.json"):
        assert (published / name).read_bytes() == (chosen / name).read_bytes()
    assert json.loads((published / "fledge_provenance.json").read_text())["step"] == 0  # what was there is kept
    assert (published / "training.png").read_bytes() == b"png"
    assert "step-000004 3.00, step-000008 2.00" in (published / "README.md").read_text()


def test_among_equals_the_last_one(context: StageContext) -> None:
    """Random drafters are never right on this target's habits, so both have length 1."""
    summary = evaluate.run(context)
    tried = json.loads((context.directory / "evaluation.json").read_text())["candidates"]
    assert tried == {"step-000004": 1.0, "step-000008": 1.0}
    assert summary["best"] == "step-000008"
    assert summary["different_answers"] == 0


def test_every_turn_is_answered_with_the_target_s_own_history(context: StageContext) -> None:
    llm = evaluation.open_llm(context.recipe)
    questions = evaluation.read_held_out(context.inputs["prepare"] / "held_out.jsonl", "held-out")
    turns, too_long = evaluation.answer_questions(llm, questions, context.recipe)
    assert too_long == 0
    assert [turn.question for turn in turns] == [0, 1, 1, 2]
    assert [question.turns for question in questions] == [1, 2, 1]
    answer = llm.tokenizer.decode(turns[1].answer, skip_special_tokens=True)
    history = [USER, {"role": "assistant", "content": answer}, {"role": "user", "content": "and"}]
    assert list(turns[2].prompt) == llm.encode_chat(history)
    assert turns[3].prompt == (10, 11, 12)


def test_prompts_that_do_not_fit_are_left_out_and_counted(context: StageContext) -> None:
    long = {"role": "user", "content": "x" * 300}
    questions = [
        Question(source="s", category="c", messages=(USER, long)),
        Question(source="s", category="c", messages=(long,)),
    ]
    turns, too_long = evaluation.answer_questions(evaluation.open_llm(context.recipe), questions, context.recipe)
    assert (len(turns), too_long) == (1, 2)


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
    questions = evaluation.read_questions(path, "mine", skipped)
    assert [(question.category, question.turns) for question in questions] == [("math", 2), ("mine", 1), ("mine", 1)]
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
    opened: list[object] = []
    real: Callable[..., Any] = evaluation.open_llm
    monkeypatch.setattr(evaluation, "open_llm", lambda *a, **k: opened.append(a) or real(*a, **k))
    assert evaluate.run(context) == first
    assert len(opened) == 1
    assert (context.directory / "evaluation.json").read_bytes() == whole


def broken_measure(turn_number: int, place: int) -> Callable[..., Measurement]:
    def measure(_llm: Any, turns: list[Turn], _recipe: Recipe, depth: int, _advance: Any) -> Measurement:
        statistics = AcceptanceStatistics()
        statistics.add(drafted=depth, accepted=0)
        different = {turn_number: place} if len(turns) > turn_number else {}
        return Measurement(depth=depth, groups={("held-out", "a"): statistics}, tokens=1, different=different)

    return measure


def test_changed_text_is_an_error_in_float32(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "measure", broken_measure(0, 2))
    with pytest.raises(FledgeError, match="1 of 4 answers are not the target's own"):
        evaluate.run(context)
    assert not (context.directory / "drafter").exists()


def test_a_tie_may_fall_either_way(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "measure", broken_measure(0, 2))
    monkeypatch.setattr(evaluation, "TIE", 1e9)
    assert evaluate.run(context)["different_answers"] == 2


def test_bfloat16_counts_and_goes_on(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "measure", broken_measure(1, 0))
    context = replace(context, recipe=replace(context.recipe, target=replace(context.recipe.target, dtype="bfloat16")))
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


def test_prompts_are_taken_evenly() -> None:
    assert evaluation.spread(list(range(10)), 4) == [0, 2, 5, 7]
    assert evaluation.spread([1, 2], 4) == [1, 2]


def test_measurements_survive_json() -> None:
    statistics = AcceptanceStatistics()
    statistics.add(drafted=3, accepted=2, rounds=4)
    measured = Measurement(depth=3, groups={("s", "c"): statistics}, tokens=7, different={2: 5})
    assert Measurement.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured
    assert set(measured.by_category()) == {"c"}
    two = replace(measured, groups={("s", "c"): statistics, ("t", "c"): statistics})
    assert set(two.by_category()) == {"s/c", "t/c"}
    assert two.total.rounds == 8


def test_first_difference() -> None:
    assert evaluation.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert evaluation.first_difference([1, 2], [1, 2, 3]) == 2


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)
