"""The suite on the real engine and probe, with tiny models."""

from dataclasses import replace
from pathlib import Path

import pytest

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.drift.perturb import UNPERTURBED
from fledge.drift.probe import Prober, ProbeSettings
from fledge.drift.suite import check, figures, run_suite
from fledge.evaluation.workloads import Prompt, Workload
from fledge.report.intervals import Bootstrap
from tests.tiny_models import TINY_TARGET, drafter_configs, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

TURNS = ({"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"})
WORKLOAD = Workload(
    name="small",
    prompts=(
        Prompt(id="single", category="", messages=TURNS[:1]),
        Prompt(id="open", category="", messages=TURNS),
        Prompt(id="long", category="", messages=({"role": "user", "content": "Too long. " * 500},)),
    ),
    source="here",
    licence="none",
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
    settings = ProbeSettings(depth=3, max_tokens=12)
    prober = Prober(str(pair / "target"), "small", settings, {"device": "cpu"})
    drafters = [str(pair / "eagle1"), str(pair / "eagle3.1")]
    names = ("template:llama3", "template-noise:0.3", "pad:1k", "pad:4k", "temperature:0.8")
    suite, found = run_suite(drafters, WORKLOAD, names, prober, tmp_path, bootstrap=Bootstrap(resamples=50))
    assert [drafter.variant for drafter in suite.drafters] == ["EAGLE-1/2", "EAGLE-3.1"]
    for drafter in drafters:
        assert list(suite.cell(drafter).left_out) == ["long"]
        assert suite.cell(drafter, "pad:4k:before").skip == "4096 tokens of padding do not fit into 2200 tokens"
        results = {name: result for (one, name), result in found.items() if one == drafter}
        assert len(results) == 5
        assert all(result.acceptance.rounds > 0 for result in results.values())
        assert {(one.drafter, one.target, one.workload) for one in results.values()} == {
            (drafter, str(pair / "target"), "small")
        }
        assert all(result.perturbation == name for name, result in results.items())
        assert results["pad:1k:before"].prompt_tokens > results[UNPERTURBED].prompt_tokens + 2000
        assert results["template:llama3"].prompt_tokens > results[UNPERTURBED].prompt_tokens
        assert [results[name].temperature for name in (UNPERTURBED, "temperature:0.8")] == [0.0, 0.8]
    # Earlier turns have the target's own answers, the same for both drafters.
    lengths = [found[drafter, UNPERTURBED].prompt_tokens for drafter in drafters]
    assert lengths[0] == lengths[1] > 2 * len("<user>One?\n<assistant>") + len("Two?")
    one, other = (figures(suite, drafter) for drafter in drafters)
    assert "top_layer_share" not in one
    assert 0 < other["top_layer_share"] < 1
    assert check(["al<1"], other) == []

    again = Prober(str(pair / "target"), "small", settings, {"device": "cpu"})
    retold = run_suite(drafters, WORKLOAD, names, again, tmp_path, bootstrap=Bootstrap(resamples=50))
    assert retold == (suite, found)
    assert not hasattr(again, "source")  # all of it was there: no model was loaded
    deeper = Prober(prober.target, "small", replace(settings, depth=4), {"device": "cpu"})
    assert deeper.identity(drafters[0]) != prober.identity(drafters[0])
