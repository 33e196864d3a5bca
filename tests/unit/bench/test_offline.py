"""`fledge bench offline`: closed loop, turns, records, budgets, failures, the best depth."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fledge.bench import offline
from fledge.bench.contenders import draft_modes
from fledge.bench.figures import halves
from fledge.bench.inflate import SHAPES
from fledge.bench.offline import (
    ClosedLoop,
    OfflineRun,
    OfflineSettings,
    cycled,
    graph_sizes,
)
from fledge.bench.rows import Best
from fledge.bench.summary import Summary
from fledge.decoding.params import SamplingParams
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.engine.protocol import DeadEngineError
from fledge.errors import ConfigError
from fledge.evaluation.results import Cell, Contender, Load, RequestRecord, Results, read_results, token_digest
from fledge.evaluation.workloads import Prompt, load_workload
from tests.fake_vllm import install
from tests.tiny_models import make_target
from tests.unit.bench.offline_cases import SHAPE, Pair, write_pair

ONE = Load(concurrency=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))


def settings(pair: Pair, **changes: Any) -> OfflineSettings:
    values: dict[str, Any] = {
        "target": pair.target,
        "drafters": pair.drafters,
        "modes": tuple(draft_modes([2], "", [])),
        "workloads": (load_workload(pair.workload),),
        "loads": (ONE, Load(concurrency=3)),
        "requests": 4,
        "repeats": 2,
        "max_tokens": 6,
        "device": "cpu",
    }
    return OfflineSettings(**{**values, **changes})


def run_offline(settings: OfflineSettings, out: Path | None = None) -> Results:
    return OfflineRun(settings=settings, out=out).run()


def best_modes(results: Results) -> list[Best]:
    return Summary(results, results.baseline).best_modes


def test_a_run_records_every_request_of_every_cell(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "results.json"
    modes = tuple(draft_modes([2], "2x4", ["1-1:3"]))
    results = run_offline(settings(pair, modes=modes), out=out)
    assert read_results(out).to_dict() == results.to_dict()
    assert results.status == "complete"
    assert results.kind == "offline"
    assert [c.name for c in results.contenders] == [
        "no speculation",
        *(f"{v} {m}" for v in ("EAGLE-3", "EAGLE-3.1") for m in ("K=2", "K=2 tree 2x4", "K=3@1-1")),
    ]
    assert results.contenders[2].speculation == {
        "model": pair.drafters[0], "num_speculative_tokens": 2, "tree_width": 2, "tree_budget": 4,
    }  # fmt: skip
    assert len(results.cells) == 2 * 2 * 7
    for cell in results.cells:
        assert [r.prompt for r in cell.requests] == ["q0", "q1", "q2", "q3"]
        assert all(r.error is None for r in cell.requests)
        for r in cell.requests:
            assert 0 <= r.sent < r.first_token < r.done <= cell.seconds + 1e-9  # type: ignore[operator]
            assert r.output_tokens >= 1
            assert bool(cell.acceptance_statistics.rounds) == (cell.contender != "no speculation")
    # Greedy: every contender, at every concurrency, in every repeat, says the same.
    assert len({tuple(r.digest for r in cell.requests) for cell in results.cells}) == 1
    assert {best.drafter for best in best_modes(results)} == set(pair.drafters)


def test_vllm_is_measured_beside_ours(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in, which answers with tokens of its own; or alone, and then no model is loaded here."""
    install(monkeypatch, tmp_path)
    modes = tuple(draft_modes([3], "2x4", []))
    asked = settings(pair, drafters=pair.drafters[1:], modes=modes, repeats=1, ignore_eos=True, vllm=True)
    results = run_offline(asked)
    assert results.status == "complete"
    speculating = ["EAGLE-3.1 K=3", "EAGLE-3.1 K=3 tree 2x4"]
    assert [(one.name, one.kind) for one in results.contenders] == [
        *((name, "fledge") for name in ("no speculation", *speculating)),
        *((f"vLLM {name}", "vllm") for name in ("no speculation", speculating[0])),
    ]
    assert any("Trees and the controller are our engine's own" in note for note in results.notes)
    cells = {(cell.contender, cell.load): cell for cell in results.cells}
    for load in asked.loads:
        theirs, plain = cells["vLLM EAGLE-3.1 K=3", load], cells["vLLM no speculation", load]
        assert [r.output_tokens for r in theirs.requests] == [
            r.output_tokens for r in cells["no speculation", load].requests
        ]
        assert theirs.acceptance_statistics.accepted_by_depth[0] > 0
        assert not plain.acceptance_statistics.rounds
        assert [r.digest for r in theirs.requests] == [r.digest for r in plain.requests]
    monkeypatch.setattr(offline, "load_models", None)
    alone = run_offline(replace(asked, vllm_only=True, vllm_options=("--tensor-parallel-size", "2")))
    assert [one.kind for one in alone.contenders] == ["vllm", "vllm"]
    assert alone.status == "complete"
    with pytest.raises(ConfigError, match="--inflate: vLLM reads checkpoints"):
        replace(asked, inflate="8b")


def test_contenders_take_turns_in_another_order_each_time(pair: Pair) -> None:
    cells = run_offline(settings(pair, max_tokens=2)).cells
    order = [(c.repeat, c.load.concurrency, c.contender) for c in cells]
    firsts = [[name for *_, name in group] for _, group in itertools.groupby(order, key=lambda c: c[:2])]
    assert all(sorted(group) == sorted(firsts[0]) for group in firsts)
    assert firsts[0][0] != firsts[-1][0]


def test_an_inflated_run_says_what_the_small_pair_says(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", SHAPE)
    small = run_offline(settings(pair, repeats=1))
    large = run_offline(settings(pair, repeats=1, inflate="tiny"))
    assert [c.inflated for c in large.contenders] == ["tiny"] * 3
    assert [c.inflated for c in small.contenders] == [None] * 3
    assert any("Inflated to the shape tiny" in note for note in large.notes)
    for one, other in zip(small.cells, large.cells, strict=True):
        assert [r.digest for r in one.requests] == [r.digest for r in other.requests]
        assert [r.acceptance for r in one.requests] == [r.acceptance for r in other.requests]
    assert large.settings["parameters"]["target"] > 3 * small.settings["parameters"]["target"]


def test_a_loop_keeps_so_many_in_flight() -> None:
    engine = LLMEngine(make_target(), None, EngineConfig(max_model_len=64, max_num_seqs=8, enable_prefix_caching=False))
    in_flight = []
    step = engine.step

    def watched() -> list[Any]:
        in_flight.append(len(engine.scheduler.running) + len(engine.scheduler.waiting))
        return step()

    engine.step = watched  # type: ignore[method-assign]
    prompts = [Prompt(id=str(i), category="a", token_ids=tuple(range(2, 5 + i % 3))) for i in range(9)]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    loop = ClosedLoop(engine=engine, prompts=prompts, concurrency=3, params=params, eos_ids=())
    loop.run()
    assert max(in_flight) == 3
    assert in_flight.count(3) > len(in_flight) * 0.6
    assert [r.prompt for r in loop.records] == [q.id for q in prompts]
    assert {r.output_tokens for r in loop.records} == {5}
    engine.check_integrity()


def test_out_of_time_is_labelled_and_nothing_is_made_up(pair: Pair) -> None:
    results = run_offline(settings(pair, minutes=0.0))
    assert (results.status, results.cells) == ("partial", ())
    assert any(
        "out of time: 0 of 12 cells were begun; not measured: no speculation, " in note for note in results.notes
    )


def test_ctrl_c_keeps_what_was_measured(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = OfflineRun(settings=settings(pair), out=tmp_path / "results.json")
    measured = run.measure
    calls = itertools.count()

    def interrupted(turn: Any, advance: Any) -> None:
        if next(calls) == 2:
            engine = run._engines[turn.contender]
            add = engine.add_request
            added = itertools.count()

            def add_some(*args: Any, **named: Any) -> Any:
                if next(added) == 2:
                    raise KeyboardInterrupt
                return add(*args, **named)

            monkeypatch.setattr(engine, "add_request", add_some)
        measured(turn, advance)

    monkeypatch.setattr(run, "measure", interrupted)
    results = run.run()
    assert run.interrupted
    assert [cell.status for cell in results.cells] == ["complete", "complete", "partial"]
    assert results.cells[-1].note == "interrupted"
    assert results.status == "partial"
    assert any(note.startswith("interrupted: 3 of 12 cells were begun") for note in results.notes)
    assert read_results(tmp_path / "results.json").to_dict() == results.to_dict()


def test_an_engine_that_dies_takes_only_its_own_cells(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made = offline.make_engine

    def mortal(models: Any, contender: Any, *rest: Any) -> LLMEngine:
        engine = made(models, contender, *rest)
        if contender.drafter == pair.drafters[0]:
            steps, step = itertools.count(), engine.step

            def dies() -> list[Any]:
                if next(steps) > 20:
                    raise DeadEngineError("the device is gone")
                return step()

            engine.step = dies  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(offline, "make_engine", mortal)
    results = run_offline(settings(pair, loads=(ONE,)))
    by_name = {
        name: [c.status for c in results.cells if c.contender == name] for name in ("no speculation", "EAGLE-3 K=2")
    }
    assert by_name["no speculation"] == ["complete"] * 2
    assert "complete" not in by_name["EAGLE-3 K=2"]
    assert results.status == "partial"
    broken = [c for c in results.cells if c.contender == "EAGLE-3 K=2"]
    assert all("the device is gone" in str(c.note) for c in broken)


def test_a_cell_that_a_bug_ends_does_not_look_whole(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = offline.make_engine

    def buggy(models: Any, contender: Any, *rest: Any) -> LLMEngine:
        engine = made(models, contender, *rest)
        calls, add = itertools.count(), engine.add_request

        def add_some(*args: Any, **named: Any) -> Any:
            if next(calls) == 6:  # after the warm-up
                raise RuntimeError("a bug")
            return add(*args, **named)

        engine.add_request = add_some  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(offline, "make_engine", buggy)
    with pytest.raises(RuntimeError, match="a bug"):
        run_offline(settings(pair), out=tmp_path / "results.json")
    (cell,) = read_results(tmp_path / "results.json").cells
    assert cell.status in ("partial", "failed")
    assert cell.note == "RuntimeError: a bug"


def test_prompts_that_do_not_fit_are_left_out_and_counted(pair: Pair) -> None:
    some = run_offline(settings(pair, repeats=1, max_model_len=30, drafters=(), modes=()))
    assert any("prompts are too long and left out" in note for note in some.notes)
    with pytest.raises(ConfigError, match="no prompt fits into 10 tokens"):
        run_offline(settings(pair, max_model_len=10))


def test_names_sizes_and_spellings(pair: Pair) -> None:
    assert graph_sizes([1, 4, 20]) == [1, 2, 4, 8, 16, 20]
    assert draft_modes([2], "4x16,8", ["1-4:5,5:3"])[1:] == [
        {"num_speculative_tokens": 2, "tree_width": 4, "tree_budget": 16},
        {"num_speculative_tokens": 2, "tree_width": 8, "tree_budget": 60},
        {"num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 5, 3]]},
    ]
    for trees, schedules in (("4by16", []), ("", ["1-4"]), ("", ["4-1:3"])):
        with pytest.raises(ConfigError, match="expected"):
            draft_modes([2], trees, schedules)
    prompts = [Prompt(id=str(i), category="a") for i in range(6)]
    assert [q.id for q in cycled(prompts, 3)] == ["0", "2", "4"]
    assert [q.id for q in cycled(prompts[:2], 3)] == ["0", "1", "0"]
    assert token_digest([1, 23]) != token_digest([12, 3])
    assert settings(pair, requests=None).prompts_for(Load(concurrency=16)) == 32
    assert settings(pair, requests=2).prompts_for(Load(concurrency=16)) == 16


def results_with(speeds: dict[str, float]) -> Results:
    """Contenders whose tokens take as long as said, with 10 prompts and 2 repeats of slight noise."""
    cells = []
    for name, seconds in speeds.items():
        for repeat in range(2):
            requests = tuple(
                RequestRecord(
                    prompt=str(i),
                    sent=0,
                    first_token=0.1,
                    done=0.1 + 10 * seconds * (1 + 0.01 * (i % 3)),
                    output_tokens=11,
                )
                for i in range(10)
            )
            load = Load(concurrency=1)
            cells.append(Cell(contender=name, workload="w", load=load, repeat=repeat, seconds=9, requests=requests))
    contenders = tuple(
        Contender(name=name, kind="fledge", target="t", drafter=None if name == "none" else "d") for name in speeds
    )
    return Results(
        kind="offline", title="", baseline="none", contenders=contenders, cells=tuple(cells), settings={}, provenance={}
    )


def test_the_best_depth_is_named_with_those_it_cannot_be_told_from() -> None:
    (best,) = best_modes(results_with({"none": 0.02, "K=3": 0.0121, "K=5": 0.01, "K=4": 0.01}))
    assert best.contender == "K=5"
    assert best.alike == ("K=4",)
    assert best.over_baseline is not None
    assert best.over_baseline.value == pytest.approx(2.0)
    line = str(best)
    assert "K=5 is the fastest per user, 2.00x" in line
    assert " (chosen on other prompts)" in line
    assert line.endswith("not told apart from it: K=4")


def test_the_best_depth_is_chosen_on_other_prompts_than_it_is_reported_on() -> None:
    """Each depth is twice as fast as no speculation on one half of the prompts and just as fast on the other."""
    results = results_with({"none": 0.02, "K=3": 0.02, "K=5": 0.02})
    quick = dict(zip(("K=3", "K=5"), halves(results.cells), strict=True))
    assert [len(prompts) for prompts in quick.values()] == [5, 5]

    def halved(cell: Cell) -> Cell:
        prompts = quick.get(cell.contender, ())
        return replace(
            cell,
            requests=tuple(
                replace(one, done=0.1 + ((one.done or 0) - 0.1) / (2 if one.prompt in prompts else 1))
                for one in cell.requests
            ),
        )

    (best,) = best_modes(replace(results, cells=tuple(map(halved, results.cells))))
    assert best.chosen == ("K=3", "K=5")
    assert best.over_baseline is not None
    assert best.over_baseline.value == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0244, "w, C=1, d: slower at best, 0.82x [0.82, 0.82] the speed of none per user with K=3"),
        (0.02, "w, C=1, d: no faster beyond noise, 1.00x [1.00, 1.00] the speed of none per user with K=3"),
    ],
)
def test_nothing_slower_than_no_speculation_is_called_the_fastest(seconds: float, said: str) -> None:
    (best,) = best_modes(results_with({"none": 0.02, "K=3": seconds}))
    assert str(best) == said


def test_no_best_where_a_contender_is_missing() -> None:
    whole = results_with({"none": 0.02, "K=3": 0.012, "K=5": 0.01})
    cut = [c if c.contender != "K=5" else replace(c, status="partial") for c in whole.cells]
    assert best_modes(replace(whole, cells=tuple(cut))) == []
