"""`fledge eval` below the command line: what is measured, what is said about it, and what if it goes wrong."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from rich.table import Table

from fledge import LLM, SamplingParams
from fledge.checkpoints.contract import INFLATED
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import load_target, save_target
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.errors import ConfigError
from fledge.evaluation import acceptance, evaluate
from fledge.evaluation.acceptance import AcceptanceMeter, Measurement, TargetAnswers
from fledge.evaluation.baseline import baselines
from fledge.evaluation.evaluate import EvalSettings, run_eval
from fledge.evaluation.report import EvalReport, plus_minus
from fledge.evaluation.results import Results, read_results, statistics_of, write_results
from fledge.evaluation.workloads import Prompt, Workload
from fledge.models.drafter.variants import EAGLE_3, EAGLE_3_1
from fledge.progress import Progress
from tests.tiny_models import TINY_TARGET, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from tests.tiny_training import write_target

QUIET = Progress(quiet=True)


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter, one with half of the vocabulary, and one that cannot be used."""
    root: Path = tmp_path_factory.mktemp("pair")
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,), max_positions=128)
    target = make_target(config)
    save_target(target, root / "target")
    save_tokenizer(root / "target")
    save_drafter(make_drafter(EAGLE_3_1.config_for(config), target), root / "full")
    half = replace(EAGLE_3.config_for(config), draft_vocab_size=VOCAB_SIZE // 2)
    save_drafter(make_drafter(half, target), root / "half")
    (root / "broken").mkdir()
    (root / "broken/config.json").write_text("{}")
    return root


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))


def workload(name: str, *conversations: tuple[str, ...], category: str = "c") -> Workload:
    prompts = tuple(
        Prompt(
            id=f"{name}-{i}",
            category=category,
            messages=tuple({"role": "user", "content": turn} for turn in turns),
        )
        for i, turns in enumerate(conversations)
    )
    return Workload(name=name, prompts=prompts, source="here", licence="mine")


def settings(pair: Path, *drafters: str, **changes: object) -> EvalSettings:
    values = {"depths": (2,), "max_tokens": 12, "max_num_seqs": 4, "device": "cpu", **changes}
    return EvalSettings(target=str(pair / "target"), drafters=tuple(str(pair / d) for d in drafters), **values)


TWO = workload("two", ("Hi?", "Why?"), ("Count.", "On?"), category="x")
ONE = workload("one", ("A?",), ("B?",), ("C?",), category="y")


@pytest.fixture(name="measured", scope="module")
def _measured(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    with mock.patch.dict("os.environ", {"FLEDGE_CACHE": str(tmp_path_factory.mktemp("cache"))}):
        yield run_eval(settings(pair, "full", "half", depths=(1, 3)), [TWO, ONE], QUIET)


def test_every_contender_and_workload_is_a_cell(measured: Results) -> None:
    assert measured.kind == "eval"
    assert measured.status == "complete"
    names = [f"{d} K={k} T={t}" for d in ("full", "half") for k in (1, 3) for t in (0, 1)]
    assert [contender.name for contender in measured.contenders] == names
    assert [(cell.contender, cell.workload) for cell in measured.cells] == [
        (name, workload) for name in names for workload in ("two", "one")
    ]
    assert all(len(cell.requests) == (4 if cell.workload == "two" else 3) for cell in measured.cells)
    assert {contender.temperature for contender in measured.contenders} == {0.0, 1.0}
    assert measured.contenders[2].speculation["num_speculative_tokens"] == 3
    facts = measured.settings["workloads"]["two"]
    assert facts["digest"] == TWO.digest
    assert facts["categories"] == {"x": ["two-0", "two-1"]}
    assert measured.settings["dtype"] == "float32"


def test_the_text_is_the_targets_own(measured: Results) -> None:
    assert not any(record.differs for cell in measured.cells for record in cell.requests)
    digests = {
        (cell.workload, i): {
            other.requests[i].digest
            for other in measured.cells
            if other.workload == cell.workload and other.contender.endswith("T=0")
        }
        for cell in measured.cells
        for i in range(len(cell.requests))
    }
    assert all(len(found) == 1 for found in digests.values())
    assert (
        EvalReport(measured).lossless
        == "Lossless: all 28 answers at temperature 0 are the target's own, token for token."
    )


def test_acceptance_is_what_the_engine_counts(pair: Path, measured: Results) -> None:
    (cell,) = [cell for cell in measured.cells if cell.contender == "full K=3 T=0" and cell.workload == "one"]
    llm = LLM(
        pair / "target",
        speculative_config={"model": str(pair / "full"), "num_speculative_tokens": 3, "adaptive": False},
        device="cpu",
        enable_prefix_caching=False,
    )
    asked = [[dict(message) for message in prompt.messages] for prompt in ONE.prompts]
    outputs = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=12))
    expected = AcceptanceStatistics.merge(output.metrics.acceptance for output in outputs)
    assert cell.acceptance_statistics == expected
    row = next(row for row in EvalReport(measured).rows if row.contender == "full K=3 T=0")
    assert row.by_workload["one"].value == pytest.approx(expected.acceptance_length)


def test_trees_are_measured_as_the_engine_drafts_them(pair: Path) -> None:
    tree = {"tree_width": 32, "tree_budget": 63}  # so large that this drafter, which knows nothing, hits now and then
    found = run_eval(settings(pair, "full", depths=(3,), temperatures=(0.0,), speculative_config=tree), [ONE], QUIET)
    (contender,), (cell,) = found.contenders, found.cells
    assert contender.name == "full K=3 tree 32x63 T=0"
    assert found.title == "Acceptance length of full, tree 32x63"
    speculation = {"model": str(pair / "full"), "num_speculative_tokens": 3, **tree}
    assert contender.speculation == speculation
    llm = LLM(pair / "target", speculative_config={**speculation, "adaptive": False}, device="cpu")
    asked = [[dict(message) for message in prompt.messages] for prompt in ONE.prompts]
    outputs = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=12))
    assert cell.acceptance_statistics == AcceptanceStatistics.merge(one.metrics.acceptance for one in outputs)
    assert sum(cell.acceptance_statistics.accepted_by_depth)
    assert "| full | 3 tree 32x63 | 0 |" in EvalReport(found).markdown()


def test_sampled_drafts_are_drawn(pair: Path) -> None:
    """A drafter that is sure of nothing: its likeliest draft and one that is drawn are seldom the same."""
    chains, drawn = (
        run_eval(settings(pair, "full", temperatures=(1.0,), speculative_config=more), [ONE], QUIET)
        for more in ({}, {"draft_sample_method": "probabilistic"})
    )
    assert [one.name for one in drawn.contenders] == ["full K=2 sampled T=1"]
    tallies = [[one.acceptance for cell in found.cells for one in cell.requests] for found in (chains, drawn)]
    assert tallies[0] != tallies[1]


def test_what_has_an_option_of_its_own_is_no_part_of_the_speculative_config(pair: Path) -> None:
    with pytest.raises(ConfigError, match="leave out num_speculative_tokens: there are options"):
        settings(pair, "full", speculative_config={"num_speculative_tokens": 4})
    with pytest.raises(ConfigError, match="draft trees are not sampled"):
        settings(pair, "full", speculative_config={"tree_width": 2, "draft_sample_method": "probabilistic"})


def test_baselines_pool_the_workloads(measured: Results) -> None:
    found = baselines(measured)
    assert {Path(drafter).name for drafter in found} == {"full", "half"}
    for drafter, baseline in found.items():
        for cell in baseline.cells:
            name = f"{Path(drafter).name} K={cell.depth} T={cell.temperature:g}"
            parts = [one.acceptance_statistics for one in measured.cells if one.contender == name]
            pooled = AcceptanceStatistics.merge(parts)
            assert cell.rounds == pooled.rounds
            assert cell.rate_by_depth == pytest.approx(pooled.rate_by_depth, abs=1e-4)


def test_baselines_have_acceptance_without_repetition_and_without_copies(measured: Results) -> None:
    tallies = {"fresh_acceptance": ((3, 1, 4),), "novel_acceptance": ((3, 3, 1), (3, 0, 1))}
    counts = {"repeated_tokens": 3, "copied_tokens": 6}
    cells = [
        replace(cell, requests=tuple(replace(one, output_tokens=12, **tallies, **counts) for one in cell.requests))
        for cell in measured.cells
    ]
    for baseline in baselines(replace(measured, cells=tuple(cells))).values():
        for cell in baseline.cells:
            assert (cell.fresh_acceptance_length, cell.novel_acceptance_length) == (2.0, 2.5)
            assert (cell.repeated, cell.copied) == (0.25, 0.5)


def test_copies_of_the_prompt_are_told_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This target's next token follows from the last one: given its loop it goes on copying, else it is led into it."""
    write_target(tmp_path / "target")
    target = load_target(tmp_path / "target")
    save_drafter(make_drafter(EAGLE_3_1.config_for(target.config), target), tmp_path / "full")
    (said,) = LLM(tmp_path / "target", device="cpu").generate([[70]], SamplingParams(temperature=0.0, max_tokens=60))
    answer = said.outputs[0].token_ids
    assert [answer.index(token) for token in answer[6:16]] == [
        6,
        7,
        8,
        9,
        10,
    ] * 2  # six tokens lead into a loop of five
    asked = {"given": (70, *answer), "led": (70,)}
    workloads = [
        Workload(name=name, prompts=(Prompt(id=name, category="c", token_ids=ids),), source="here", licence="mine")
        for name, ids in asked.items()
    ]
    monkeypatch.setattr(evaluate, "with_token_ids", lambda workload, _: workload)
    found = run_eval(settings(tmp_path, "full", temperatures=(0.0,), max_tokens=60), workloads, QUIET)
    given, led = (cell.requests[0] for cell in found.cells)
    assert (led.output_tokens, led.repeated_tokens) == (60, 60 - 11)
    report = EvalReport(found)
    (row,) = report.rows
    assert row.copied_by_workload == {"given": 1.0, "led": 0.0}
    assert given.acceptance
    assert not given.novel_acceptance
    assert 0 < statistics_of(led.novel_acceptance).rounds < statistics_of(led.acceptance).rounds
    assert led.novel_acceptance == led.fresh_acceptance
    assert set(row.novel_by_workload) == {"led"}
    assert any("copies the prompt in 100 % of its greedy text on given" in note for note in report.notes)
    (baseline,) = baselines(found).values()
    (cell,) = baseline.cells
    assert cell.copied == 0.5
    assert cell.novel_acceptance_length == pytest.approx(statistics_of(led.novel_acceptance).acceptance_length)


def test_sampled_answers_follow_the_seed(pair: Path) -> None:
    def digests(seed: int) -> list[str | None]:
        found = run_eval(settings(pair, "full", temperatures=(1.0,), seed=seed), [ONE], QUIET)
        return [record.digest for cell in found.cells for record in cell.requests]

    assert digests(0) == digests(0)
    assert digests(0) != digests(50)


def test_misses_outside_the_draft_vocabulary_are_attributed(measured: Results) -> None:
    rows = {row.contender: row for row in EvalReport(measured).rows}
    assert rows["full K=3 T=0"].missed > 0
    assert rows["full K=3 T=0"].missed_outside == 0
    assert 0 < rows["half K=3 T=0"].missed_outside <= rows["half K=3 T=0"].missed
    assert rows["half K=3 T=0"].outside_vocabulary > 0.2


def test_results_survive_the_file(measured: Results, tmp_path: Path) -> None:
    write_results(measured, tmp_path / "r.json")
    again = read_results(tmp_path / "r.json")
    assert EvalReport(again).rows == EvalReport(measured).rows
    assert EvalReport(again).markdown() == EvalReport(measured).markdown()


def test_the_markdown_has_every_row_and_says_how(measured: Results) -> None:
    text = EvalReport(measured).markdown()
    assert "| drafter | K | T | two | one | mean |" in text
    assert text.count("\n| half | 3 | 1 |") == 8 - 1  # one bucket only: no table by input length
    assert "| drafter | K | T | x | y |" in text
    assert "1 + accepted drafts / rounds" in text
    assert "Target `target`, float32" in text
    assert "two 2, one 3" in text
    assert str(Path.home()) not in text
    assert "/tmp" not in text


def test_tables_are_split_to_fit_the_terminal(measured: Results) -> None:
    def shown(width: int) -> list[Table]:
        return [part for table in EvalReport(measured).tables(plus_minus) for part in table.to_rich(width)]

    def headers(width: int) -> list[list[str]]:
        return [[str(column.header) for column in table.columns][3:] for table in shown(width)]

    assert headers(200)[0] == ["two", "one", "mean"]
    narrow = headers(40)
    assert narrow[:3] == [["two"], ["one"], ["mean"]]
    assert [name for part in narrow for name in part] == [name for part in headers(200) for name in part]
    assert shown(200)[5].columns[-1].header.plain == "rounds"
    for table in shown(40):
        assert len({len(column._cells) for column in table.columns}) == 1


def test_inflated_targets_are_labelled(pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair / "target", tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text())
    (tmp_path / "target/config.json").write_text(json.dumps({**config, INFLATED: {"shape": "8b"}}))
    with mock.patch.object(evaluate._EvalRun, "answer", side_effect=KeyboardInterrupt):
        found = run_eval(replace(settings(pair, "full"), target=str(tmp_path / "target")), [ONE], QUIET)
    assert "inflated to the shape 8b: acceptance is that of the small pair" in found.notes


def test_json_values_are_plain(measured: Results) -> None:
    values = json.loads(json.dumps(EvalReport(measured).summary(), allow_nan=False))
    assert len(values["rows"]) == 8
    assert values["rows"][0]["by_workload"]["two"]["value"] >= 1


def test_prompts_that_do_not_fit_are_named(pair: Path) -> None:
    long = workload("long", ("x" * 300,), ("Fits?",), ("x" * 90, "y" * 30))
    found = run_eval(settings(pair, "full", temperatures=(0.0,)), [long], QUIET)
    facts = found.settings["workloads"]["long"]
    assert facts["too_long"] == ["long-0"]
    assert facts["cut_short"] == ["long-2"]
    assert [record.prompt for record in found.cells[0].requests] == ["long-1", "long-2"]
    assert "long: 1 of 3 prompts do not fit into 128 tokens and were not asked: long-0" in found.notes
    assert "long: later turns of 1 prompts do not fit into 128 tokens: long-2" in found.notes
    assert "long 2" in EvalReport(found).markdown()
    with pytest.raises(ConfigError, match="no prompt fits into 128 tokens"):
        run_eval(settings(pair, "full"), [workload("all", ("x" * 300,))], QUIET)


def test_a_drafter_that_cannot_be_used_fails_alone(pair: Path) -> None:
    found = run_eval(settings(pair, "broken", "full", temperatures=(0.0,)), [ONE], QUIET)
    assert [cell.status for cell in found.cells] == ["failed", "complete"]
    assert found.status == "partial"
    assert any(note.startswith("broken K=2 T=0: ") for note in found.notes)
    rows = EvalReport(found).rows
    assert rows[0].mean is None
    assert rows[0].failed["one"]
    assert "| broken | 2 | 0 | - |\n" in EvalReport(found).markdown()


def test_a_drafter_that_breaks_down_is_no_measurement(pair: Path) -> None:
    def fail(meter: AcceptanceMeter, *arguments: object) -> Measurement:
        meter.llm.engine._stats.drafter_failure = "boom"
        return measure(meter, *arguments)

    measure = AcceptanceMeter.measure
    with mock.patch.object(AcceptanceMeter, "measure", fail):
        found = run_eval(settings(pair, "full", temperatures=(0.0,)), [ONE], QUIET)
    assert found.cells[0].status == "failed"
    assert "switched off: boom" in found.cells[0].note
    assert EvalReport(found).rows[0].by_workload == {}


def test_an_interruption_keeps_what_was_measured(pair: Path) -> None:
    calls = []

    def interrupt(*arguments: object) -> Measurement:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    measure = AcceptanceMeter.measure
    with mock.patch.object(AcceptanceMeter, "measure", interrupt):
        found = run_eval(settings(pair, "full"), [TWO, ONE], QUIET)
    assert found.status == "partial"
    assert [(cell.contender, cell.workload) for cell in found.cells] == [("full K=2 T=0", "two")]
    assert "interrupted: what was not finished is missing" in found.notes
    assert "T=1" not in EvalReport(found).markdown()


def test_the_target_is_loaded_once(pair: Path) -> None:
    with mock.patch.object(acceptance, "LLM", side_effect=LLM) as load:
        found = run_eval(settings(pair, "full", "broken", "half", depths=(1, 2)), [ONE], QUIET)
    assert load.call_count == 1
    assert [cell.status for cell in found.cells] == ["complete"] * 4 + ["failed"] * 4 + ["complete"] * 4


@pytest.mark.parametrize(("tie", "verdict"), [(1e9, "near tie"), (0.0, "please report it")])
def test_answers_that_part_are_counted_and_judged(pair: Path, tie: float, verdict: str) -> None:
    """A drafter cannot change the text, so the target's own answers are changed under it."""

    def falsified(*arguments: object) -> TargetAnswers:
        found = answer(*arguments)
        first, *rest = found.turns
        wrong = ((first.answer_token_ids[0] + 1) % VOCAB_SIZE, *first.answer_token_ids[1:])
        return replace(found, turns=(replace(first, answer_token_ids=wrong), *rest))

    answer = AcceptanceMeter.answer
    with mock.patch.object(AcceptanceMeter, "answer", falsified), mock.patch.object(acceptance, "TIE", tie):
        found = run_eval(settings(pair, "full", temperatures=(0.0,)), [ONE], QUIET)
    (row,) = EvalReport(found).rows
    assert (row.answers, row.different, row.unchecked) == (3, 1, 0)
    assert row.clear == (1 if tie == 0.0 else 0)
    assert "Of 3 answers at temperature 0, 1 part" in EvalReport(found).lossless
    assert verdict in EvalReport(found).lossless


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": (0,)}, "depth: found 0, allowed is 1 to 16"),
        ({"depths": ()}, "depths"),
        ({"depths": (3, 3)}, "each only once"),
        ({"temperatures": (3.0,)}, "temperature: found 3, allowed is 0 to 2"),
    ],
)
def test_settings_out_of_range(pair: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(pair, "full", **changes)


def test_results_are_saved_after_every_drafter_and_depth(pair: Path, tmp_path: Path) -> None:
    """What a killed run leaves behind: all drafters and depths but the one it was at, labelled."""
    out, seen = tmp_path / "eval.json", []

    def looking(*arguments: object) -> None:  # the first thing that is done for a drafter and depth
        seen.append(read_results(out) if out.exists() else None)
        set_drafter(*arguments)

    set_drafter = AcceptanceMeter.set_drafter
    with mock.patch.object(AcceptanceMeter, "set_drafter", looking):
        given = run_eval(settings(pair, "full", "half", depths=(1, 2), temperatures=(0.0,)), [ONE], QUIET, out)
    left = [one for one in seen if one is not None]
    assert [len(one.cells) for one in left] == [1, 2, 3]
    assert {one.status for one in left} == {"partial"}
    assert all("still running, or killed" in one.notes[-1] for one in left)
    final = read_results(out)
    assert (final.status, final.notes, len(final.cells)) == ("complete", (), 4)
    assert len(given.cells) == 4
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["eval.json"]


def test_a_file_that_cannot_be_written_is_said_in_one_line(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match=r"--out .*taken: cannot be written"):
        run_eval(settings(pair, "full", temperatures=(0.0,)), [ONE], QUIET, tmp_path / "taken")
