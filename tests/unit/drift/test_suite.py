"""The suite with a made-up probe: what runs, what is kept, what is skipped, and the figures that come out."""

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from fledge.drift.answers import AnsweredPrompts
from fledge.drift.perturb import UNPERTURBED, PerturbationContext, perturb
from fledge.drift.probe import ProbeSettings
from fledge.drift.result import DriftResult
from fledge.drift.suite import (
    FIGURES,
    SuiteCell,
    SuiteResult,
    check,
    drift_figures,
    figures,
    parse_conditions,
    run_suite,
    summarise,
    worst_of,
)
from fledge.errors import ConfigError
from fledge.evaluation.workloads import Prompt, Workload
from fledge.report.intervals import Bootstrap
from tests.unit.drift.drift_cases import byte_tokenizer, drift_result


def workload(*prompts: Prompt, name: str = "made up") -> Workload:
    return Workload(name=name, prompts=prompts, source="here", licence="none")


def asked(*turns: str, id: str = "x") -> Prompt:
    messages = tuple({"role": "user", "content": turn} for turn in turns)
    return Prompt(id=id, category="test", messages=messages)


WORKLOAD = workload(*(asked(f"Question {i}?", id=str(i)) for i in range(12)))
TOKENIZER = byte_tokenizer()
NAMES = ("template:llama3", "template:plain", "system:long", "pad:1k", "pad:64k", "history:2", "temperature:0.7")
# Accepted of 20 rounds: the unperturbed acceptance length is 1.8.
ACCEPTED = {UNPERTURBED: 16, "template:llama3": 12, "template:plain": 8, "pad:1k:before": 14, "temperature:0.7": 17}
QUICK = Bootstrap(resamples=100)


@dataclass
class FakeProber:
    """Probes without models: acceptance follows the perturbation, with a little of the prompt's own."""

    weights: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    temperatures: dict[str, float | None] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    die_at: str | None = None
    out_of_memory: str | None = None
    recent: tuple[float, ...] = (0.1, 0.3, 0.6)
    accepted: int | None = None
    settings = ProbeSettings()
    context = PerturbationContext(tokenizer=TOKENIZER, max_model_len=8000, answer_tokens=50)

    def identity(self, drafter: str) -> Any:
        return {"weights": self.weights.get(drafter, 0)}

    @property
    def drafter(self) -> str:
        return self.loaded[-1]

    def load(self, drafter: str) -> None:
        self.loaded.append(drafter)

    @property
    def target_identity(self) -> Any:
        return "target"

    def answered(self, prompts, perturbation, _advance):
        changed = perturb(perturbation, prompts, self.context)
        return AnsweredPrompts(prompts=changed.prompts, answers=(), left_out=changed.left_out, skip=changed.skip)

    def probe(self, answered, given, advance):
        perturbation = given.name
        if perturbation == self.die_at:
            raise KeyboardInterrupt
        if perturbation == self.out_of_memory:
            raise torch.OutOfMemoryError
        advance(0, note="decode 1/2")
        self.calls.append((self.loaded[-1], perturbation))
        self.temperatures[perturbation] = given.temperature
        accepted = ACCEPTED.get(perturbation, 15) if self.accepted is None else self.accepted
        counts = {one.id: (accepted + (i % 3) - 1, 20) for i, one in enumerate(answered.prompts)}
        recent = self.recent if perturbation != "pad:1k:before" else (0.1, 0.3, 0.7)
        return drift_result(counts, recent=recent, perturbation=perturbation, drafter=self.loaded[-1])

    def answer_earlier_turns(self, prompts):
        self.calls.append((self.loaded[-1], "answer"))
        reply = {"role": "assistant", "content": "An answer."}
        return [replace(one, messages=(one.messages[0], reply, *one.messages[1:])) for one in prompts]


def run(tmp_path, prober, *, drafters=("one",), names=NAMES, workload=WORKLOAD) -> SuiteResult:
    return run_suite(drafters, workload, names, prober, tmp_path, bootstrap=QUICK)[0]


def test_cells_are_compared_with_the_unperturbed_run(tmp_path):
    suite = run(tmp_path, FakeProber(), drafters=("one", "two"))
    assert suite.perturbations[0] == UNPERTURBED
    assert len(suite.cells) == 2 * 8
    base, plain = suite.cell("one"), suite.cell("one", "template:plain")
    assert base.acceptance_length.value == pytest.approx(1.8)
    assert base.compared is None
    assert plain.compared.ratio.value == pytest.approx(1.4 / 1.8)
    assert plain.compared.is_paired
    assert plain.compared.ratio.low < 1.4 / 1.8 < plain.compared.ratio.high < 1
    assert suite.cell("one", "pad:1k:before").recent_compared.value == pytest.approx(0.1)
    (skipped,) = [cell for cell in suite.cells if cell.skip and cell.drafter == "one"]
    assert skipped.perturbation == "pad:64k:before"
    assert skipped.skip == "65536 tokens of padding do not fit into 8000 tokens"
    assert len(skipped.left_out) == 12
    assert skipped.acceptance_length is None


def test_the_temperature_is_the_perturbations_or_the_runs_own(tmp_path):
    prober = FakeProber()
    run(tmp_path, prober)
    assert prober.temperatures["temperature:0.7"] == 0.7
    assert prober.temperatures[UNPERTURBED] is None


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    first = FakeProber(die_at="system:long")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, first)
    assert not (tmp_path / "suite.json").exists()
    second = FakeProber()
    suite = run(tmp_path, second)
    done = {name for _, name in first.calls}
    assert done == {UNPERTURBED, "template:llama3", "template:plain"}
    assert not done & {name for _, name in second.calls}
    assert suite == run(tmp_path / "fresh", FakeProber())
    third = FakeProber()
    assert run(tmp_path, third) == suite
    assert third.loaded == []


def test_damaged_and_outdated_cells_are_probed_anew(tmp_path):
    run(tmp_path, FakeProber())
    (cell,) = tmp_path.glob("cells/*/template-plain.json")
    cell.write_text(cell.read_text()[:100])
    again = FakeProber()
    run(tmp_path, again)
    assert again.calls == [("one", "template:plain")]
    retrained = FakeProber(weights={"one": 1})
    run(tmp_path, retrained)
    assert len(retrained.calls) == 7
    other = FakeProber(weights={"one": 1})
    run(tmp_path, other, workload=workload(*WORKLOAD.prompts[:11]))
    assert len(other.calls) == 7


def test_memory_that_did_not_suffice_is_tried_again(tmp_path):
    suite = run(tmp_path, FakeProber(out_of_memory="system:long"))
    assert suite.cell("one", "system:long").skip.startswith("the device's memory does not suffice")
    again = FakeProber()
    assert run(tmp_path, again).cell("one", "system:long").skip is None
    assert again.calls == [("one", "system:long")]


def test_drafters_of_the_same_directory_name_do_not_share_cells(tmp_path):
    prober = FakeProber()
    run(tmp_path, prober, drafters=("a/drafter", "b/drafter"), names=())
    assert prober.calls == [("a/drafter", UNPERTURBED), ("b/drafter", UNPERTURBED)]
    with pytest.raises(ConfigError, match="each once"):
        run(tmp_path, prober, drafters=("a", "a"))


def test_earlier_turns_are_answered_once(tmp_path):
    turns = workload(asked("One?", "Two?"), name="open")
    prober = FakeProber()
    run(tmp_path, prober, workload=turns, names=(), drafters=("one", "two"))
    run(tmp_path, prober, workload=turns, names=(), drafters=("one", "two"))
    assert prober.calls == [("one", "answer"), ("one", UNPERTURBED), ("two", UNPERTURBED)]


def test_a_workload_that_cannot_be_run_is_refused(tmp_path):
    too_long = workload(asked("Long? " * 2000))
    with pytest.raises(ConfigError, match="unperturbed workload cannot be run: the prompt and an answer of 50 tokens"):
        run(tmp_path, FakeProber(), workload=too_long)


def test_saved_and_read_back(tmp_path):
    suite = run(tmp_path, FakeProber())
    assert SuiteResult.from_dict(json.loads((tmp_path / "suite.json").read_text())) == suite
    (path,) = tmp_path.glob("cells/one-*/pad-1k-before.json")
    result = DriftResult.from_dict(json.loads(path.read_text())["result"])
    assert result.perturbation == "pad:1k:before"
    assert result.by_depth[2].attention.mass["drafted"] == 0.7
    assert not list(tmp_path.rglob("*.tmp"))


def test_figures(tmp_path):
    found = figures(run(tmp_path, FakeProber()), "one")
    expected = {
        "al": 1.8,
        "al_with_repetition": 1.8,
        "accepted_per_round": 0.8,
        "repetition": 0,
        "al_drop": 1 - 1.4 / 1.8,
        "al_drop_template": 1 - 1.4 / 1.8,
        "al_drop_system": 1 - 1.75 / 1.8,
        "al_drop_long_context": 1 - 1.7 / 1.8,
        "al_drop_history": 1 - 1.75 / 1.8,
        "al_drop_temperature": 1 - 1.85 / 1.8,  # a gain
        "recent_attention_depth_1": 0.1,
        "recent_attention_last": 0.6,
        "recent_attention_change": 0.5,
        "recent_attention_slope": 0.25,
        "recent_attention_rise": 0.1,
        "prompt_attention_last": 0.25,
        "sink_attention_last": 0.15,
        "sink_attention_change": -0.5,
        "hidden_growth": 3,
        "feature_growth": 1.5,
        "top_layer_share": 0.7,
        "ece": 0.07,
        "outside_vocabulary": 0.25,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert 0 < found["al_drop_certain"] < found["al_drop"]
    assert "al_drop_format" not in found  # nothing of the kind was run
    assert set(found) <= set(FIGURES)


def test_the_depth_of_drift_is_a_verdict_and_no_figure_of_few_prompts(tmp_path, monkeypatch):
    suite = run(tmp_path, FakeProber(), names=("template:llama3",))
    assert "drift_depth" not in figures(suite, "one")
    with pytest.raises(ConfigError, match="'drift_depth' was not measured in this run: a verdict takes 20 prompts"):
        check(["drift_depth<4"], figures(suite, "one"))
    monkeypatch.setattr("fledge.drift.change.FEW_PROMPTS", 2)
    assert figures(suite, "one")["drift_depth"] == 2


def test_composed_perturbations_count_in_no_single_group(tmp_path):
    suite = run(tmp_path, FakeProber(), names=("template:llama3", "template:gemma+history:2", "json+tools"))
    assert worst_of(suite.perturbed("one"))[0].perturbation == "template:llama3"
    assert worst_of(suite.perturbed("one", "history")) is None
    assert worst_of(suite.perturbed("one", "format"))[0].perturbation == "json+tools"


def test_acceptance_leaves_repetition_out_and_gives_the_whole_beside_it():
    whole = drift_result({"a": (10, 20), "b": (12, 20)})
    # Of each answer's accepted drafts, eight are in a loop.
    rows = tuple(
        replace(row, fresh_tally=((3, 0, 20 - accepted), (3, 1, accepted - 8)), repeated_tokens=2)
        for row, accepted in zip(whole.prompt_rows, (10, 12), strict=True)
    )
    cell = SuiteCell(drafter="one", perturbation=UNPERTURBED, kinds=(), left_out={}, skip=None)
    results = {("one", UNPERTURBED): replace(whole, prompt_rows=rows)}
    suite = summarise([cell], results, workload="made up", bootstrap=QUICK)
    found = figures(suite, "one")
    assert found["al"] == pytest.approx(1 + 6 / 24)
    assert found["accepted_per_round"] == pytest.approx(6 / 24)
    assert found["al_with_repetition"] == pytest.approx(1 + 22 / 40)
    assert found["repetition"] == pytest.approx(0.4)


def test_acceptance_without_copies_of_the_prompt_is_given_where_prompts_tell():
    older = drift_result({"a": (10, 20), "b": (12, 20)})
    rows = tuple(replace(row, novel_tally=((3, 0, 3), (3, 1, 1)), copied_tokens=3) for row in older.prompt_rows)
    cell = SuiteCell(drafter="one", perturbation=UNPERTURBED, kinds=(), left_out={}, skip=None)
    found = [
        figures(summarise([cell], {("one", UNPERTURBED): one}, workload="made up", bootstrap=QUICK), "one")
        for one in (older, replace(older, prompt_rows=rows))
    ]
    assert not {"al_without_copies", "copies"} & set(found[0])
    assert found[1]["al_without_copies"] == pytest.approx(1 + 1 / 4)
    assert found[1]["copies"] == pytest.approx(0.6)
    assert found[1]["al"] == found[0]["al"]


def test_eagle_1_has_no_layers_to_share():
    result = drift_result({"a": (1, 2)}, shares={"embedding": 0.4, "final state": 0.6})
    assert drift_figures(result)["top_layer_share"] is None


def test_check_names_what_is_violated():
    measured = {"al_drop": 0.31, "al": 2.5, "drift_depth": math.inf}
    assert check(["al_drop>0.2"], measured) == ["al_drop>0.2 (al_drop is 0.31)"]
    assert check(["al_drop > 0.4, al<2", "drift_depth<=4"], measured) == []
    assert len(check(["al_drop>=.31", "al<=2.5", "al!=3e0"], measured)) == 3
    assert check([], measured) == []


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("al_dorp>0.2", "unknown figure 'al_dorp'.*Did you mean 'al_drop'"),
        ("al_drop", "expected a figure, a comparison and a number"),
        ("al_drop>0.2; import os", "expected a figure"),
        ("al_drop>al", "expected a figure"),
        ("al>1,,al>2", "condition ''"),
        ("1<2", "unknown figure '1'"),
    ],
)
def test_bad_conditions_are_refused(expression, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_conditions([expression])


def test_a_condition_on_what_was_not_measured_is_no_success():
    with pytest.raises(ConfigError, match="'al_drop_long_context' was not measured"):
        check(["al_drop_long_context>0.1"], {"al": 2.0})
