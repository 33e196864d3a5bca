"""`fledge eval` below the command line: what is measured, what is said about it, and what if it goes wrong."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from fledge import LLM, SamplingParams
from fledge.bench import evaluate
from fledge.bench.evaluate import EvalSettings, run_eval
from fledge.bench.evaluate_figures import EvalRow, eval_rows, half_width
from fledge.bench.evaluate_tables import lossless, markdown, summary, tables
from fledge.bench.evaluate_turns import request_record
from fledge.bench.results import Cell, Contender, Load, RequestRecord, Results, read_results, write_results
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.integrity import INFLATED
from fledge.checkpoints.target import save_target
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.errors import ConfigError
from fledge.evaluation.workloads import Prompt, Workload
from fledge.models.drafter.variants import EAGLE_3, EAGLE_3_1
from fledge.progress import Progress
from fledge.report.intervals import Interval
from tests.tiny_models import TINY_TARGET, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

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
    assert lossless(measured) == "Lossless: all 28 answers at temperature 0 are the target's own, token for token."


def test_acceptance_is_what_the_engine_counts(pair: Path, measured: Results) -> None:
    (cell,) = [cell for cell in measured.cells if cell.contender == "full K=3 T=0" and cell.workload == "one"]
    llm = LLM(
        pair / "target",
        speculative_config={"model": str(pair / "full"), "num_speculative_tokens": 3},
        device="cpu",
        enable_prefix_caching=False,
    )
    asked = [[dict(message) for message in prompt.messages] for prompt in ONE.prompts]
    outputs = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=12))
    expected = AcceptanceStatistics.merge(output.metrics.acceptance for output in outputs)
    assert cell.acceptance_statistics == expected
    row = next(row for row in eval_rows(measured) if row.contender == "full K=3 T=0")
    assert row.by_workload["one"].value == pytest.approx(expected.acceptance_length)


def test_sampled_answers_follow_the_seed(pair: Path) -> None:
    def digests(seed: int) -> list[str | None]:
        found = run_eval(settings(pair, "full", temperatures=(1.0,), seed=seed), [ONE], QUIET)
        return [record.digest for cell in found.cells for record in cell.requests]

    assert digests(0) == digests(0)
    assert digests(0) != digests(50)


def test_misses_outside_the_draft_vocabulary_are_attributed(measured: Results) -> None:
    rows = {row.contender: row for row in eval_rows(measured)}
    assert rows["full K=3 T=0"].missed > 0
    assert rows["full K=3 T=0"].missed_outside == 0
    assert 0 < rows["half K=3 T=0"].missed_outside <= rows["half K=3 T=0"].missed
    assert rows["half K=3 T=0"].outside_vocabulary > 0.2


def test_a_miss_counts_where_its_right_token_is_known(pair: Path) -> None:
    llm = LLM(
        pair / "target", speculative_config={"model": str(pair / "full"), "num_speculative_tokens": 3}, device="cpu"
    )
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=9))
    rounds = output.outputs[0].rounds
    tokens = (1, 2, 3, *output.outputs[0].token_ids)
    right = [tokens[r.start + r.accepted] for r in rounds if r.accepted < r.drafted and r.start + r.accepted < 12]
    in_draft = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    in_draft[right[0]] = False
    record = request_record("p", output, in_draft)
    assert record.missed == len(right)
    assert record.missed_outside == right.count(right[0])
    assert request_record("p", output, None).missed_outside == 0


def test_results_survive_the_file(measured: Results, tmp_path: Path) -> None:
    write_results(measured, tmp_path / "r.json")
    again = read_results(tmp_path / "r.json")
    assert eval_rows(again) == eval_rows(measured)
    assert markdown(again) == markdown(measured)


def test_the_markdown_has_every_row_and_says_how(measured: Results) -> None:
    text = markdown(measured)
    assert "| drafter | K | T | two | one | mean |" in text
    assert text.count("\n| half | 3 | 1 |") == 4 - 1  # one bucket only: no table by input length
    assert "| drafter | K | T | x | y |" in text
    assert "1 + accepted drafts / rounds" in text
    assert "Target `target`, float32" in text
    assert "two 2, one 3" in text
    assert str(Path.home()) not in text
    assert "/tmp" not in text


def test_tables_are_split_to_fit_the_terminal(measured: Results) -> None:
    def headers(width: int) -> list[list[str]]:
        return [[str(column.header) for column in table.columns][3:] for table in tables(measured, width)]

    assert headers(200)[0] == ["two", "one", "mean"]
    narrow = headers(40)
    assert narrow[:3] == [["two"], ["one"], ["mean"]]
    assert [name for part in narrow for name in part] == [name for part in headers(200) for name in part]
    for table in tables(measured, 40):
        assert len({len(column._cells) for column in table.columns}) == 1


def test_inflated_targets_are_labelled(pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair / "target", tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text())
    (tmp_path / "target/config.json").write_text(json.dumps({**config, INFLATED: {"shape": "8b"}}))
    with mock.patch.object(evaluate._Run, "answer", side_effect=KeyboardInterrupt):
        found = run_eval(replace(settings(pair, "full"), target=str(tmp_path / "target")), [ONE], QUIET)
    assert "inflated to the shape 8b: acceptance is that of the small pair" in found.notes


def test_json_values_are_plain(measured: Results) -> None:
    values = json.loads(json.dumps(summary(measured), allow_nan=False))
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
    assert "long 2" in markdown(found)
    with pytest.raises(ConfigError, match="no prompt fits into 128 tokens"):
        run_eval(settings(pair, "full"), [workload("all", ("x" * 300,))], QUIET)


def test_a_drafter_that_cannot_be_used_fails_alone(pair: Path) -> None:
    found = run_eval(settings(pair, "broken", "full", temperatures=(0.0,)), [ONE], QUIET)
    assert [cell.status for cell in found.cells] == ["failed", "complete"]
    assert found.status == "partial"
    assert any(note.startswith("broken K=2 T=0: ") for note in found.notes)
    rows = eval_rows(found)
    assert rows[0].mean is None
    assert rows[0].failed["one"]
    assert "| broken | 2 | 0 | - | - |" in markdown(found)


def test_a_drafter_that_breaks_down_is_no_measurement(pair: Path) -> None:
    def fail(llm: LLM, *arguments: object, **named: object) -> object:
        llm.engine._stats.drafter_failure = "boom"
        return answer(llm, *arguments, **named)

    answer = evaluate.answer_turns
    with mock.patch.object(evaluate, "answer_turns", fail):
        found = run_eval(settings(pair, "full", temperatures=(0.0,)), [ONE], QUIET)
    assert found.cells[0].status == "failed"
    assert "switched off: boom" in found.cells[0].note
    assert eval_rows(found)[0].by_workload == {}


def test_an_interruption_keeps_what_was_measured(pair: Path) -> None:
    calls = []

    def interrupt(*arguments: object, **named: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return answer(*arguments, **named)

    answer = evaluate.answer_turns
    with mock.patch.object(evaluate, "answer_turns", interrupt):
        found = run_eval(settings(pair, "full"), [TWO, ONE], QUIET)
    assert found.status == "partial"
    assert [(cell.contender, cell.workload) for cell in found.cells] == [("full K=2 T=0", "two")]
    assert "interrupted: what was not finished is missing" in found.notes
    assert "T=1" not in markdown(found)


@pytest.mark.parametrize(("tie", "verdict"), [(1e9, "near tie"), (0.0, "please report it")])
def test_answers_that_part_are_counted_and_judged(pair: Path, tie: float, verdict: str) -> None:
    """A drafter cannot change the text, so the target's own answers are changed under it."""

    def falsified(*arguments: object, **named: object) -> object:
        turns, too_long = answer(*arguments, **named)
        first = turns[0]
        wrong = ((first.answer[0] + 1) % VOCAB_SIZE, *first.answer[1:])
        return [replace(first, answer=wrong), *turns[1:]], too_long

    answer = evaluate.answer_questions
    with mock.patch.object(evaluate, "answer_questions", falsified), mock.patch.object(evaluate, "TIE", tie):
        found = run_eval(settings(pair, "full", temperatures=(0.0,)), [ONE], QUIET)
    (row,) = eval_rows(found)
    assert (row.answers, row.different, row.unchecked) == (3, 1, 0)
    assert row.clear == (1 if tie == 0.0 else 0)
    assert "Of 3 answers at temperature 0, 1 part" in lossless(found)
    assert verdict in lossless(found)


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


def made_up(*records: tuple[str, str, tuple[int, int, int], int]) -> Results:
    """Records: (workload, prompt, (drafted, accepted, rounds), prompt tokens)."""
    names = list(dict.fromkeys(record[0] for record in records))
    cells = tuple(
        Cell(
            contender="d K=2 T=0",
            workload=name,
            load=Load(concurrency=1),
            repeat=0,
            seconds=1.0,
            requests=tuple(
                RequestRecord(prompt=p, sent=0.0, done=1.0, prompt_tokens=tokens, output_tokens=3, acceptance=(triple,))
                for n, p, triple, tokens in records
                if n == name
            ),
        )
        for name in names
    )
    facts = {
        name: {"categories": {"c": [p for n, p, *_ in records if n == name]}, "prompts": 9, "too_long": []}
        for name in names
    }
    return Results(
        kind="eval",
        title="made up",
        baseline=None,
        contenders=(Contender(name="d K=2 T=0", kind="fledge", target="t", speculation={"num_speculative_tokens": 2}),),
        cells=cells,
        settings={"workloads": facts, "dtype": "float32", "device": "cpu", "max_tokens": 3},
        provenance={},
    )


def only_row(results: Results) -> EvalRow:
    (row,) = eval_rows(results)
    return row


def test_figures_by_hand() -> None:
    row = only_row(
        made_up(
            ("a", "1", (2, 2, 3), 100),  # 6 accepted in 3 rounds
            ("a", "1", (2, 0, 1), 300),  # another turn of the same prompt
            ("a", "2", (2, 1, 4), 100),
            ("b", "1", (2, 2, 5), 3000),
        )
    )
    assert row.by_workload["a"].value == pytest.approx(1 + 10 / 8)
    assert row.by_workload["b"] == Interval(value=3.0)  # one prompt says nothing about others
    assert row.mean.value == pytest.approx((2.25 + 3) / 2)
    assert row.mean.low is None
    assert row.by_category["c"].value == pytest.approx(1 + 20 / 13)
    assert list(row.by_length) == ["128", "512", "4k"]
    assert row.by_length["128"].value == pytest.approx(1 + 10 / 7)
    assert row.rate_by_depth == pytest.approx((12 / 13, 8 / 13))
    assert row.rounds == 13
    # Prompts are resampled, not turns: whichever two are drawn, the figure lies between those of the two prompts.
    assert row.by_workload["a"].low == pytest.approx(1 + 4 / 4)
    assert row.by_workload["a"].high == pytest.approx(1 + 6 / 4)
    assert half_width(row.by_workload["a"]) == pytest.approx(0.25)


def test_the_mean_is_missing_where_a_workload_is() -> None:
    whole = made_up(("a", "1", (2, 2, 3), 1), ("b", "1", (2, 1, 3), 1))
    failed = replace(whole, cells=(whole.cells[0], replace(whole.cells[1], status="failed", note="it broke")))
    row = only_row(failed)
    assert row.mean is None
    assert set(row.by_workload) == {"a"}
    assert row.failed == {"b": "it broke"}


def test_results_are_saved_after_every_drafter_and_depth(pair: Path, tmp_path: Path) -> None:
    """What a killed run leaves behind: all drafters and depths but the one it was at, labelled."""
    out, seen = tmp_path / "eval.json", []
    release = evaluate.release

    def looking() -> None:  # the last thing that is done for a drafter and depth, before the next save
        seen.append(read_results(out) if out.exists() else None)
        release()

    with mock.patch.object(evaluate, "release", looking):
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
