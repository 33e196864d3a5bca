"""The suite on the real engine and probe, with tiny models."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.drift import sources
from fledge.drift.answers import AnswerCache
from fledge.drift.perturb import UNPERTURBED, parse_perturbation
from fledge.drift.probe import Prober, ProbeSettings
from fledge.drift.prompts import ProbePrompt
from fledge.drift.suite import check, figures, probe_cell, run_suite
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


CONDITIONS = ("unperturbed", "noise:0.5", "bos:none", "template:llama3", "template:llama3+pin", "temperature:0.9")
PROMPTS = [ProbePrompt(**vars(one)) for one in WORKLOAD.prompts[:2]]


def prober_of(pair: Path, answers: Path | None = None) -> Prober:
    settings = ProbeSettings(depth=3, max_tokens=12)
    return Prober(str(pair / "target"), "small", settings, {"device": "cpu"}, answers=AnswerCache(answers))


def test_answers_and_states_are_shared_and_a_result_is_what_the_drafter_gives_alone(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = list[int]()
    original = sources.EngineSource.answers
    monkeypatch.setattr(
        sources.EngineSource, "answers", lambda self, *given: answered.append(len(given[0])) or original(self, *given)
    )

    def cells(prober: Prober, name: str, drafters: tuple[str, ...], out: str) -> list[dict]:
        perturbation = parse_perturbation(name)
        return [probe_cell(str(pair / one), perturbation, PROMPTS, prober, tmp_path / out / one) for one in drafters]

    shared, both = prober_of(pair, tmp_path / "answers"), ("eagle1", "eagle3.1")
    together = {name: cells(shared, name, both, "together") for name in CONDITIONS}
    # One layout has no begin-of-text token to take away. Noise and pinning alone change no prompt.
    assert answered == [2, 2, 2, 2]
    assert {name for name, (cell, _) in together.items() if cell["skip"]} == {"bos:none"}
    tokens = {name: cell["result"]["prompt_tokens"] for name, (cell, _) in together.items() if cell["result"]}
    assert tokens["unperturbed"] == tokens["noise:0.5"] == tokens["temperature:0.9"]
    assert tokens["unperturbed"] < tokens["template:llama3"] == tokens["template:llama3+pin"]
    assert len(list((tmp_path / "answers").glob("*.json"))) == 5

    monkeypatch.setattr(sources, "KEPT_BYTES", 0)
    alone = {name: cells(prober_of(pair), name, both[1:], "alone") for name in CONDITIONS}
    for name, (cell,) in alone.items():
        for field in ("left_out", "skip"):
            assert cell[field] == together[name][1][field]
        if cell["result"] is not None:
            assert json.dumps(cell["result"]) == json.dumps(together[name][1]["result"]), name


def test_answers_on_disk_are_taken_by_another_process_unless_damaged(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(**settings: int):
        prober = prober_of(pair, tmp_path)
        prober.settings = replace(prober.settings, **settings)
        prober.load(str(pair / "eagle3.1"))
        return prober.answered(PROMPTS, parse_perturbation("pad:1k"))

    first = answered()
    assert all(len(one.token_ids) == 12 and len(one.beyond) == 3 for one in first.answers)
    (path,) = tmp_path.glob("*.json")
    path.write_text(path.read_text().replace('"left_out":{}', '"left_out":{"x":"y"}'))
    assert answered() == first  # its digest tells: made anew
    monkeypatch.setattr(sources.EngineSource, "answers", lambda *_: pytest.fail("answered again"))
    assert answered() == first
    with pytest.raises(pytest.fail.Exception, match="answered again"):
        answered(max_tokens=11)


def test_states_that_do_not_fit_make_place_for_those_that_are_wanted(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prober, read = prober_of(pair), list[int]()
    prober.load(str(pair / "eagle3.1"))
    original = sources.target_states
    monkeypatch.setattr(sources, "target_states", lambda *a: read.extend(map(len, a[1])) or original(*a))
    monkeypatch.setattr(sources, "MAX_ROWS_ON_CPU", 12)
    (one,) = prober.source.states([[1] * 5])
    monkeypatch.setattr(sources, "KEPT_BYTES", sources._bytes(one) * 12 // 5)  # for twelve tokens
    for texts in ([[1] * 5, [2] * 7], [[2] * 7, [1] * 5], [[2] * 7, [3] * 4, [4] * 3], [[1] * 5, [4] * 3, [2] * 7]):
        assert [len(states.final) for states in prober.source.states(texts)] == list(map(len, texts))
    assert read == [5, 7, 4, 3, 5, 3]  # the third text took the place of the first, and none was left for the fourth
