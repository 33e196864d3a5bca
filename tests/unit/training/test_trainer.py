"""The training loop: what splits a step must not change it, and what interrupts a run must not change its end."""

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig

from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.reading import read_drafter
from fledge.checkpoints.target import load_target
from fledge.errors import ConfigError, FledgeError
from fledge.training import trainer
from fledge.training.recipe import DrafterSection, FitSection, Recipe, TargetSection, VocabSection
from fledge.training.stages import fit as fit_stage
from fledge.training.trainer import Trainer, TrainingInterrupted, candidate_steps
from fledge.training.ttt import TttMetrics, TttOutputs
from tests.fit_cases import (
    FIT,
    TARGET,
    copy_undisturbed_run,
    final_weights,
    log_without_times,
    make_inputs,
    offline,
    run_capture,
    run_fit,
)


@pytest.fixture(name="recipe")
def _recipe(tmp_path: Path) -> Recipe:
    return make_inputs(tmp_path)


def with_fit(recipe: Recipe, **changes: object) -> Recipe:
    return replace(recipe, fit=replace(recipe.fit, **changes))


def weights_of(recipe: Recipe, name: str) -> dict[str, torch.Tensor]:
    return final_weights(Path(recipe.output) / name)


def assert_equal_runs(recipe: Recipe, first: str, second: str, *, exactly: bool = True) -> None:
    """Tolerance where a step is split otherwise: float32 sums in another order, through eight optimizer steps."""
    a, b = weights_of(recipe, first), weights_of(recipe, second)
    assert a.keys() == b.keys()
    atol, rtol = (0.0, 0.0) if exactly else (5e-4, 1e-3)
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=atol, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )
    logs = [log_without_times(Path(recipe.output) / name) for name in (first, second)]
    if exactly:
        assert logs[0] == logs[1]
    else:
        for x, y in zip(*logs, strict=True):
            assert x["loss"] == pytest.approx(y["loss"], rel=1e-4)
            assert x["supervised"] == y["supervised"]


def test_a_run_learns_and_leaves_checkpoints_that_load(recipe: Recipe) -> None:
    summary = run_fit(with_fit(recipe, max_steps=40, save_every=15, log_every=5), plot=True)
    directory = Path(recipe.output) / "fit"
    losses = [record["loss"] for record in log_without_times(directory)]
    assert losses[-1] < 0.9 * losses[0]
    assert summary["candidates"] == ["step-000030", "step-000040"]
    assert (directory / "training.png").stat().st_size > 10_000
    target = load_target(Path(recipe.output) / "target")
    drafter = load_drafter(directory / "candidates" / "step-000040", target)
    state = {name.removeprefix("drafter."): value for name, value in weights_of(recipe, "fit").items()}
    for name, value in drafter.state_dict().items():
        if name in state:
            torch.testing.assert_close(value, state[name], atol=0, rtol=0)
    assert drafter.vocabulary is not None
    assert drafter.vocabulary.target_ids.tolist() == list(range(16, 40))


@pytest.mark.parametrize("variant", ["eagle1", "eagle3"])
def test_other_variants_train_too(variant: str, tmp_path: Path) -> None:
    recipe = make_inputs(tmp_path, draft_vocab=None)
    run_fit(with_fit(replace(recipe, drafter=DrafterSection(variant=variant)), max_steps=30, log_every=5))
    losses = [record["loss"] for record in log_without_times(tmp_path / "fit")]
    assert losses[-1] < 0.95 * losses[0]


def test_muon_learns_and_resumes_to_the_same_weights(recipe: Recipe) -> None:
    recipe = with_fit(recipe, optimizer="muon")
    run_fit(recipe, "whole")
    assert train_in_another_process(recipe, send_at(4, signal.SIGKILL)) == -signal.SIGKILL
    run_fit(recipe)
    assert_equal_runs(recipe, "whole", "fit")
    run_fit(with_fit(recipe, max_steps=40, log_every=5), "longer")
    losses = [record["loss"] for record in log_without_times(Path(recipe.output) / "longer")]
    assert losses[-1] < 0.9 * losses[0]


def test_a_run_of_some_minutes_ends_its_schedule_by_then(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(trainer.time, "monotonic", lambda: float(next(clock)))  # a second passes between two looks
    recipe = with_fit(recipe, max_steps=1000, max_minutes=1.0, save_every=4, log_every=1)
    first, directory = run_fit(recipe), Path(recipe.output) / "fit"
    assert 10 < first["steps"] < 60
    rates = [record["lr"] for record in log_without_times(directory)]
    assert max(rates) > 0.9 * recipe.fit.lr
    assert rates[-1] < 0.05 * recipe.fit.lr
    last = f"step-{first['steps']:06}"
    assert first["candidates"][-1] == last
    assert len(first["candidates"]) == 2
    monkeypatch.setattr(Trainer, "_step", lambda *_: pytest.fail("trained again"))
    assert run_fit(recipe)["steps"] == first["steps"]


def test_candidates_of_steps_that_are_made_again_go_first(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill may come between a candidate and the state to resume from; by the clock, other save points follow."""
    recipe, directory = with_fit(recipe, max_steps=6, max_minutes=60.0, save_every=2), Path(recipe.output) / "fit"
    places = directory / "candidates"
    (places / "step-000001").mkdir(parents=True)  # and no state: all steps are made again
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", lambda *_: pytest.fail("no further"))
        with pytest.raises(pytest.fail.Exception):
            run_fit(recipe)
    assert not list(places.iterdir())
    run_fit(recipe)
    shutil.copytree(places / "step-000006", places / "step-000009")
    assert run_fit(recipe)["candidates"] == ["step-000004", "step-000006"]
    assert sorted(path.name for path in places.iterdir()) == ["step-000004", "step-000006"]


def test_a_target_of_another_family(recipe: Recipe, tmp_path: Path) -> None:
    """Through transformers, to a drafter that vLLM and SGLang know."""
    config = GemmaConfig(
        vocab_size=TARGET.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 123456.0},
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gemma")
    recipe = with_fit(recipe, loss="kl", max_steps=24, log_every=4)
    run_fit(replace(recipe, target=TargetSection(path=str(tmp_path / "gemma"), dtype="float32")))
    drafter = read_drafter(tmp_path / "fit" / "candidates" / "step-000024").config
    assert (drafter.layer.rope.theta, drafter.aux_layer_ids, drafter.draft_vocab_size) == (123456.0, (2, 4, 5), 24)
    records = log_without_times(tmp_path / "fit")
    assert records[-1]["loss"] < 0.8 * records[0]["loss"]


def test_accumulation_and_checkpointing_change_nothing(recipe: Recipe) -> None:
    copy_undisturbed_run(recipe, "plain")
    run_fit(with_fit(recipe, micro_rows=1), "micro")
    run_fit(with_fit(recipe, activation_checkpointing=True), "checkpointing")
    assert_equal_runs(recipe, "plain", "micro", exactly=False)
    assert_equal_runs(recipe, "plain", "checkpointing", exactly=False)


def test_states_from_disk_train_like_states_made_on_the_way(recipe: Recipe) -> None:
    copy_undisturbed_run(recipe, "online")
    recipe = offline(recipe)
    run_capture(recipe)
    run_fit(recipe, "offline")
    assert_equal_runs(recipe, "online", "offline", exactly=False)


def test_bfloat16_compute_keeps_float32_weights(recipe: Recipe) -> None:
    copy_undisturbed_run(recipe, "float32")
    run_fit(with_fit(recipe, compute_dtype="bfloat16"), "bfloat16")
    run_fit(with_fit(recipe, compute_dtype="bfloat16", activation_checkpointing=True), "both")
    assert all(w.dtype == torch.float32 for n, w in weights_of(recipe, "bfloat16").items() if "d2t" not in n)
    logs = [log_without_times(Path(recipe.output) / name) for name in ("float32", "bfloat16", "both")]
    for plain, rounded, both in zip(*logs, strict=True):
        assert rounded["loss"] == pytest.approx(plain["loss"], rel=0.02)  # eight bits of mantissa
        assert both["loss"] == pytest.approx(rounded["loss"], rel=1e-3)
    assert logs[0] != logs[1]


def test_weights_are_rounded_once_for_all_micro_batches(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_pass, seen = Trainer._pass, []

    def noted(self: Trainer, weights: dict[str, torch.Tensor], *inputs: object) -> TttOutputs:
        seen.append(weights)
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
        return whole_pass(self, weights, *inputs)

    monkeypatch.setattr(Trainer, "_pass", noted)
    run_fit(with_fit(recipe, compute_dtype="bfloat16", micro_rows=1, max_steps=2))
    assert len(seen) == 2 * recipe.fit.rows
    assert len({id(weights) for weights in seen}) == 2


def train_in_another_process(recipe: Recipe, hook: Callable[[int], None]) -> int:
    """Train in a forked process, `hook` after each step. Returns its exit status, as subprocess gives it."""

    def train() -> None:
        whole_run = Trainer.run
        Trainer.run = lambda self: whole_run(self, hook)  # type: ignore[method-assign]
        try:
            run_fit(recipe)
        except TrainingInterrupted as stopped:
            (Path(recipe.output) / "message").write_text(str(stopped))
            os._exit(130)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join(100)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def send_at(when: int, number: int) -> Callable[[int], None]:
    return lambda step: os.kill(os.getpid(), number) if step == when else None


@pytest.mark.parametrize("steps", [(1,), (4, 7)])
def test_kill_9_and_start_again_ends_the_same_bit_for_bit(recipe: Recipe, steps: tuple[int, ...]) -> None:
    """State is saved at steps 3 and 6; kills come before the first save, between saves, and after lines were logged."""
    copy_undisturbed_run(recipe, "whole")
    for step in steps:
        assert train_in_another_process(recipe, send_at(step, signal.SIGKILL)) == -signal.SIGKILL
    run_fit(recipe, "fit")
    assert_equal_runs(recipe, "whole", "fit")
    candidate = "candidates/step-000008/model.safetensors"
    contents = [(Path(recipe.output) / name / candidate).read_bytes() for name in ("whole", "fit")]
    assert contents[0] == contents[1]


def test_a_kill_while_writing_leaves_nothing_half_done(recipe: Recipe) -> None:
    copy_undisturbed_run(recipe, "whole")
    directory = Path(recipe.output) / "fit"
    with pytest.MonkeyPatch.context() as patch:

        def killed(*_arguments: object) -> None:
            raise SystemExit("killed between the new state and its name")

        patch.setattr(os, "replace", killed)
        with pytest.raises(SystemExit):
            run_fit(recipe)
    (directory / "candidates" / ".step-000006.half").mkdir(parents=True)
    (directory / "log.jsonl").open("a").write('{"step": 99, "half')
    run_fit(recipe)
    assert_equal_runs(recipe, "whole", "fit")
    assert sorted(p.name for p in (directory / "candidates").iterdir()) == ["step-000006", "step-000008"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_and_saves(recipe: Recipe, number: int) -> None:
    copy_undisturbed_run(recipe, "whole")
    assert train_in_another_process(recipe, send_at(4, number)) == 130
    message = (Path(recipe.output) / "message").read_text()
    assert message == "stopped after step 5 of 8; the same command goes on from there"
    saved = torch.load(Path(recipe.output) / "fit" / "resume.pt", weights_only=True)
    assert saved["step"] == 5
    run_fit(recipe)
    assert_equal_runs(recipe, "whole", "fit")


def test_interruption_counts_as_a_keyboard_interrupt() -> None:
    assert issubclass(TrainingInterrupted, KeyboardInterrupt)


def test_a_finished_run_is_not_trained_again(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_fit(recipe)
    monkeypatch.setattr(Trainer, "_step", lambda *_: pytest.fail("trained again"))
    assert run_fit(recipe) == first


def test_a_state_of_another_recipe_is_refused(recipe: Recipe) -> None:
    run_fit(recipe)
    with pytest.raises(FledgeError, match="belongs to another recipe"):
        run_fit(with_fit(recipe, lr=1e-3))
    run_fit(with_fit(recipe, micro_rows=2))  # no part of the result: may change


def test_non_finite_steps_are_left_out_and_counted(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_pass, calls = Trainer._pass, 0

    def broken(self: Trainer, *inputs: object) -> object:
        nonlocal calls
        calls += 1
        outputs = whole_pass(self, *inputs)
        if calls == 5:
            self.drafter.layers[0].mlp.down_proj.weight.grad.fill_(float("nan"))
        return outputs

    monkeypatch.setattr(Trainer, "_pass", broken)
    summary = run_fit(recipe)
    assert summary["skipped_steps"] == 1
    assert all(bool(weight.isfinite().all()) for weight in weights_of(recipe, "fit").values())
    records = log_without_times(Path(recipe.output) / "fit")
    assert [record["skipped"] for record in records] == [0, 1, 1]
    assert all(record["loss"] > 0 for record in records)


def test_it_gives_up_when_numbers_stay_broken(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_pass = Trainer._pass

    def broken(self: Trainer, *inputs: object) -> object:
        loss, metrics = whole_pass(self, *inputs)
        return TttOutputs(loss * float("nan"), metrics)

    monkeypatch.setattr(Trainer, "_pass", broken)
    with pytest.raises(FledgeError, match=r"4 steps in a row up to step 4 .* lower fit\.lr"):
        run_fit(with_fit(recipe, max_bad_steps=4, log_every=100))


def test_weights_that_diverged_are_never_written(recipe: Recipe) -> None:
    with pytest.raises(FledgeError, match=r"weights are not finite: training diverged; lower fit\.lr"):
        run_fit(with_fit(recipe, lr=1e38, max_bad_steps=1000))
    assert not list((Path(recipe.output) / "fit").rglob("*.safetensors"))
    assert not list((Path(recipe.output) / "fit").glob("resume*"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"drafter": DrafterSection(variant="eagle1"), "vocab": VocabSection(size=8)}, r"vocab\.size: EAGLE-1 .* null"),
        ({"drafter": DrafterSection(aux_layer_ids=(99,))}, r"drafter\.aux_layer_ids"),
        ({"fit": FitSection(length=1 << 20)}, r"fit\.length: found 1048576, allowed is up to"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_stage_runs(
    recipe: Recipe, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        fit_stage.STAGE.settings(replace(recipe, **changes))


def test_bad_steps_add_nothing_to_the_sums() -> None:
    sums, other = TttMetrics.zeros(2), TttMetrics.zeros(2)
    other.loss.fill_(float("nan"))
    other.steps.fill_(float("nan"))
    sums.add(other, torch.tensor(False))
    assert all(not tensor.any() for tensor in sums.tensors())


def test_candidates_are_the_last_save_points() -> None:
    assert candidate_steps(replace(FIT, save_every=3, candidates=2), 8) == (6, 8)
    assert candidate_steps(replace(FIT, save_every=3, candidates=2), 9) == (6, 9)
    assert candidate_steps(replace(FIT, save_every=100, candidates=3), 8) == (8,)


def test_what_may_change_between_starts_is_no_part_of_the_key(recipe: Recipe) -> None:
    settings = fit_stage.STAGE.settings
    assert settings(recipe) == settings(with_fit(recipe, micro_rows=2, parallel="fsdp2", compile="off"))
    assert settings(recipe) != settings(with_fit(recipe, depth=2))
