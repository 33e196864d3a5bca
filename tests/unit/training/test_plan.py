"""The planner's figures against things counted in another way; its exact ones against a real run in tests/e2e."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fledge.checkpoints.target import load_target
from fledge.files import SEAL_BYTES
from fledge.models.config import DrafterConfig
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3, EAGLE_3_1, build
from fledge.progress import Progress
from fledge.training.data.examples import TokenStore
from fledge.training.pipeline import Pipeline, duration
from fledge.training.plan import FitShape, make_plan, measure_speed, plan_text, target_parameter_count
from fledge.training.recipe import CaptureSection, FitSection, Recipe, TargetSection, VllmSection, VocabSection
from tests.tiny_models import TINY_TARGET
from tests.tiny_training import write_run

PROBE = {"device": "test", "dtype": "float32", "flops_per_second": 1e9}


def shape(drafter: DrafterConfig | None = None, processes: int = 1, online: bool = True, **fit: Any) -> FitShape:
    return FitShape(
        target=TINY_TARGET,
        target_parameters=1000,
        drafter=drafter or EAGLE_3_1.config_for(TINY_TARGET),
        fit=FitSection(**{"depth": 3, "length": 16, "rows": 4, **fit}),
        online=online,
        document_length=10,
        state_bytes=2,
        compute_bytes=2,
        processes=processes,
    )


@pytest.mark.parametrize("variant", [EAGLE_1, EAGLE_3, EAGLE_3_1])
def test_parameters_are_those_of_the_module(variant: Any) -> None:
    config = variant.config_for(TINY_TARGET)
    assert shape(config).parameters == sum(p.numel() for p in build(config).parameters())


def test_state_bytes_are_all_aux_states_and_the_final_one() -> None:
    assert shape().state_bytes_per_token == (3 + 1) * 32 * 2
    assert shape(EAGLE_1.config_for(TINY_TARGET)).state_bytes_per_token == 32 * 2


def test_memory_falls_with_what_is_said_to_lower_it() -> None:
    whole = shape()
    memory = whole.memory()
    assert whole.pass_slots == 64
    assert memory["optimizer"] == 8 * whole.parameters
    assert memory["weights"] == (4 + 2) * whole.parameters
    assert memory["target"] == 2000
    assert shape(micro_rows=1).memory()["states"] == memory["states"] // 4
    assert shape(activation_checkpointing=True).memory()["activations"] < memory["activations"]
    assert shape(activation_checkpointing=True).memory()["logits"] < memory["logits"]
    assert shape(online=False).memory()["target"] == 2 * 40 * 32 * 2  # embedding and head
    both = shape(processes=2, parallel="fsdp2")
    assert both.memory()["optimizer"] == memory["optimizer"] // 2
    assert both.pass_slots == 32


def test_operations_are_those_that_torch_counts() -> None:
    """Matrix products of a forward and backward pass of the drafter's layers and head, for one slot."""
    from torch.utils.flop_counter import FlopCounterMode

    config = EAGLE_3_1.config_for(TINY_TARGET)
    drafter = build(config)
    slots = 7
    aux, both = torch.randn(slots, 96, requires_grad=True), torch.randn(slots, 64, requires_grad=True)
    hidden = torch.randn(slots, 32, requires_grad=True)
    first = drafter.layers[0]
    with FlopCounterMode(display=False) as counter:
        out = drafter.fc(aux).sum() + first.self_attn.qkv_proj(both).sum()
        out = out + first.self_attn.o_proj(hidden).sum() + first.mlp(hidden).sum() + drafter.logits(hidden).sum()
        out.backward()
    parts = shape(depth=1).flops_per_slot()
    assert counter.get_total_flops() == slots * (parts["layers"] + parts["head"])


def test_deeper_and_online_cost_more() -> None:
    assert shape(depth=6).flops_per_slot()["head"] == 2 * shape(depth=3).flops_per_slot()["head"]
    assert "target" in shape().flops_per_slot()
    assert "target" not in shape(online=False).flops_per_slot()


@pytest.fixture(scope="module", name="recipe")
def _recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    root: Path = tmp_path_factory.mktemp("plan")
    return Recipe.load(write_run(root, regenerate={"enabled": False}, capture={"mode": "offline"}))


def test_an_estimate_is_close_and_says_that_it_is_one_and_what_is_there_is_exact(recipe: Recipe) -> None:
    estimated = make_plan(recipe, probe=PROBE)
    assert not estimated["data"]["exact"]
    assert "sample of 24 of 24" in estimated["data"]["how"]
    assert not Path(recipe.output).exists()  # a plan writes nothing
    assert {stage["state"] for stage in estimated["stages"]} == {"to run"}

    report = Pipeline(recipe, progress=Progress(quiet=True)).run(until="capture")
    store = TokenStore(report.states["prepare"].directory / "examples")
    assert estimated["data"]["examples"] == len(store)
    assert estimated["data"]["tokens"] == pytest.approx(store.total_tokens, rel=0.1)
    assert estimated["fit"]["rows"] == pytest.approx(make_plan(recipe, probe=PROBE)["fit"]["rows"], abs=2)

    exact = make_plan(recipe, probe=PROBE)
    assert exact["data"]["exact"]
    assert exact["data"]["tokens"] == store.total_tokens
    assert exact["data"]["answer_tokens"] == store.answer_tokens
    assert exact["capture"]["bytes"] == store.total_tokens * 4 * 32 * 4
    shards = report.states["capture"].directory.glob("shard-*.bin")
    assert sum(path.stat().st_size - SEAL_BYTES for path in shards) == exact["capture"]["bytes"]
    assert [stage["state"] for stage in exact["stages"]] == ["up to date"] * 4 + ["to run"] * 2


def test_target_parameters_are_those_of_its_weights(recipe: Recipe) -> None:
    target = load_target(Path(recipe.target.path))
    section = TargetSection(path=recipe.target.path)
    counted = target_parameter_count(section, target.config)
    assert counted == sum(p.numel() for p in target.parameters())
    foreign = replace(target.config, family="something else")  # counted by transformers then
    assert target_parameter_count(section, foreign) == counted


def test_what_does_not_fit_is_warned_of(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    from fledge.training import plan

    monkeypatch.setattr(plan, "free_memory", lambda _device: 1_000_000)
    warnings = make_plan(recipe, probe=PROBE)["warnings"]
    assert len(warnings) == 1
    assert "most of it is activations: set fit.activation_checkpointing" in warnings[0]


def test_a_draft_vocabulary_larger_than_the_target_s_is_all_of_it(recipe: Recipe) -> None:
    plan = make_plan(replace(recipe, vocab=VocabSection(size=1 << 20)), probe=PROBE)
    assert plan["vocab"]["size"] is None
    assert any("vocab.size is 1,048,576, but the target has" in warning for warning in plan["warnings"])


def test_minutes_bound_the_time_and_the_plan_says_so(tmp_path: Path) -> None:
    recipe = Recipe.load(write_run(tmp_path, regenerate={"max_tokens": 8}))
    free = make_plan(recipe, probe=PROBE)
    assert not free["regenerate"]["cut_short"]
    minutes = {name: free[name]["seconds"] / 60 for name in ("regenerate", "fit")}

    def bounded(by: float) -> Recipe:
        regenerate = replace(recipe.regenerate, max_minutes=by * minutes["regenerate"])
        return replace(recipe, regenerate=regenerate, fit=replace(recipe.fit, max_minutes=by * minutes["fit"]))

    half = make_plan(bounded(0.5), probe=PROBE)
    assert [half[name]["seconds"] / free[name]["seconds"] for name in minutes] == pytest.approx([0.5, 0.5])
    lines = [line for line in plan_text(bounded(0.5), half).splitlines() if line.startswith(("| regenerate", "| fit"))]
    for name, line in zip(minutes, lines, strict=True):
        assert line.endswith(f"| at most {duration(half[name]['seconds'])} |")
    assert f"at most {half['fit']['steps']} steps" in lines[1]
    assert f"at most {half['regenerate']['tokens']} tokens" in lines[0]
    enough = make_plan(bounded(2.0), probe=PROBE)
    assert [enough[name]["seconds"] for name in minutes] == [free[name]["seconds"] for name in minutes]
    told = plan_text(bounded(2.0), enough).splitlines()
    assert not any("at most" in line for line in told if line.startswith(("| regenerate", "| fit")))


def test_what_vllm_hands_over(recipe: Recipe) -> None:
    two = replace(recipe, vllm=VllmSection(options="--tensor-parallel-size=2", storage_gb=1e-6))
    plans = [
        make_plan(replace(two, capture=CaptureSection(mode=mode, engine="vllm")), probe=PROBE)
        for mode in ("offline", "online")
    ]
    (tokens,), per_token = {plan["data"]["tokens"] for plan in plans}, 4 * 32 * 4 + 8
    offline, online = (plan["vllm"] for plan in plans)
    assert (offline["servers"], offline["devices"], offline["bytes_per_token"]) == (1, 2, per_token)
    assert offline["bytes"] == tokens * per_token
    assert offline["storage_bytes"] == 1000
    assert online["bytes"] > offline["bytes"]  # every epoch is read again
    ours = make_plan(recipe, probe=PROBE)
    assert plans[0]["capture"]["seconds"] == pytest.approx(ours["capture"]["seconds"] / 2)
    assert plans[1]["fit"]["memory"]["target"] == ours["fit"]["memory"]["target"]  # its ends only


def test_the_probe_measures() -> None:
    probe = measure_speed(torch.device("cpu"), torch.float32, seconds=0.05)
    assert 1e8 < probe["flops_per_second"] < 1e15
    assert probe["dtype"] == "float32"
