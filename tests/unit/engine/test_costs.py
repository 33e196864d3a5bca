"""What rounds cost: measured while warming up and in every round; for sizes and arms that never ran, guessed."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fledge.decoding.params import SamplingParams
from fledge.engine.arms import PLAIN, Arm, RequestKind
from fledge.engine.config import EngineConfig
from fledge.engine.controller import AdaptiveDepth
from fledge.engine.cost_cache import CostCache
from fledge.engine.costs import MIN_SAMPLES, OUTLIER, CostTable
from fledge.engine.engine import LLMEngine
from fledge.engine.passes import PassOutcome
from fledge.engine.programs import RoundProgram
from fledge.engine.request import Request
from fledge.engine.sampler import SamplingMode
from fledge.engine.warm_up import TIMED_LENGTH
from tests import engine_cases


def _costs(*measured: tuple[int, int, float]) -> CostTable:
    """From (batch, depth, seconds) triples, each seen often enough to be believed."""
    table = CostTable()
    for batch, depth, seconds in measured:
        for _ in range(MIN_SAMPLES):
            table.add(batch=batch, arm=Arm(depth), seconds=seconds)
    return table


def test_a_copy_of_the_costs_is_a_value_of_its_own() -> None:
    costs = CostTable()
    for _ in range(MIN_SAMPLES):
        costs.add(batch=2, arm=Arm(0), seconds=1.0)
        costs.add(batch=2, arm=Arm(3), seconds=1.5)
    kept = pickle.loads(pickle.dumps(costs.copy()))
    for _ in range(50):
        costs.add(batch=2, arm=Arm(3), seconds=9.0)
    assert kept.ratio(2, Arm(3)) == pytest.approx(1.5)
    assert costs.cost(2, Arm(3)) == pytest.approx(9.0, rel=0.01)
    assert kept.cost(4, Arm(3)) is None


def test_a_stall_while_warming_up_makes_no_plain_step_dearer_than_a_round_with_drafts() -> None:
    table = CostTable()
    for depth, seconds in ((0, 0.5), (3, 0.011), (5, 0.012)):
        table.expect(batch=1, arm=Arm(depth), seconds=seconds)
    for _ in range(MIN_SAMPLES + 1):
        table.add(batch=1, arm=Arm(5), seconds=0.012)
    assert table.ratio(1, Arm(5)) == pytest.approx(1.0), "not 0.02 of a plain step"
    assert table.cost(1, Arm(3)) == pytest.approx(0.011, rel=0.1)
    for _ in range(30):  # plain steps that do run tell for themselves, dear or not
        table.add(batch=1, arm=PLAIN, seconds=0.020)
    assert table.cost(1, PLAIN) == pytest.approx(0.020, rel=0.1)


def test_a_cost_is_the_mean_of_what_was_measured_and_follows_changes():
    table = CostTable()
    for seconds in (0.010, 0.020, 0.030):
        table.add(batch=1, arm=Arm(3), seconds=seconds)
    assert table.cost(1, Arm(3)) == pytest.approx(0.020)
    for _ in range(100):
        table.add(batch=1, arm=Arm(3), seconds=0.050)
    assert table.cost(1, Arm(3)) == pytest.approx(0.050, rel=1e-3)


def test_a_cost_between_two_measured_sizes_is_interpolated_but_never_extrapolated():
    table = _costs((4, 0, 0.010), (16, 0, 0.022))
    assert table.cost(10, Arm(0)) == pytest.approx(0.016)
    assert table.cost(5, Arm(0)) == pytest.approx(0.011)
    assert table.cost(18, Arm(0)) == pytest.approx(0.022)  # nearly the same size
    assert table.cost(64, Arm(0)) is None
    assert table.cost(1, Arm(0)) is None
    assert table.cost(4, Arm(3)) is None


def test_a_cost_is_not_believed_from_one_sample():
    table = CostTable()
    table.add(batch=1, arm=Arm(0), seconds=0.01)
    assert table.cost(1, Arm(0)) is None


def test_what_slows_the_rounds_that_run_is_taken_to_slow_the_others_too() -> None:
    table = _costs((1, 0, 0.010), (1, 3, 0.015))
    for _ in range(100):
        table.add(batch=1, arm=Arm(3), seconds=0.015)
    for _ in range(100):
        table.add(batch=1, arm=Arm(3), seconds=0.030)  # a context has grown
    assert table.cost(1, Arm(3)) == pytest.approx(0.030, rel=1e-2)
    assert table.ratio(1, Arm(3)) == pytest.approx(1.5, rel=0.02)
    for _ in range(MIN_SAMPLES + 40):
        table.add(batch=1, arm=Arm(0), seconds=0.029)  # it is measured again, and is not
    assert table.ratio(1, Arm(3)) == pytest.approx(30 / 29, rel=0.05)


def test_what_never_ran_is_as_much_slower_than_expected_as_what_did() -> None:
    table, tree = CostTable(), Arm(3, is_tree=True)
    for arm, seconds in ((PLAIN, 0.010), (Arm(3), 0.015), (tree, 0.040)):
        table.expect(batch=4, arm=arm, seconds=seconds)
    assert table.ratio(4, Arm(3)) == pytest.approx(1.5)
    for _ in range(60):
        table.add(batch=4, arm=Arm(3), seconds=0.030)  # neighbours, or contexts
    assert [table.cost(4, arm) for arm in (PLAIN, Arm(3), tree)] == pytest.approx([0.020, 0.030, 0.080], rel=0.02)
    assert table.copy().cost(4, PLAIN) == table.cost(4, PLAIN)
    for _ in range(60):
        table.add(batch=4, arm=PLAIN, seconds=0.012)  # now it has run, and was not
    assert table.cost(4, PLAIN) == pytest.approx(0.012, rel=0.02)
    for _ in range(60):
        table.add(batch=4, arm=PLAIN, seconds=0.015)
    assert table.estimate(64, tree) == pytest.approx(0.060, rel=0.02), "a tree is guessed from no chain"
    for _ in range(MIN_SAMPLES):
        table.add(batch=64, arm=Arm(3), seconds=3 * table.cost(4, Arm(3)))
    assert table.estimate(64, tree) == pytest.approx(3 * table.cost(4, tree), rel=0.05), "but grows as chains do"
    assert table.estimate(64, Arm(9, is_tree=True)) is None


def test_one_round_that_was_held_up_is_not_the_cost_of_all() -> None:
    table = _costs((1, 0, 0.010))
    table.add(batch=1, arm=Arm(0), seconds=5.0)
    assert table.cost(1, Arm(0)) < 0.02


def test_an_estimate_goes_where_nothing_was_measured() -> None:
    table = _costs((4, 0, 0.010), (4, 4, 0.014))
    assert table.estimate(4, Arm(2)) == pytest.approx(0.012)
    assert table.estimate(4, Arm(6)) == pytest.approx(0.016)
    assert table.estimate(64, Arm(0)) == pytest.approx(0.010)
    assert table.estimate(64, Arm(2)) is None
    assert table.age(4, Arm(0)) == 3
    assert table.age(64, Arm(0)) is None


def test_a_busy_host_makes_drafts_cheap_where_it_overlaps_and_dear_nowhere() -> None:
    def table(host_overlaps: bool) -> CostTable:
        costs = CostTable(host_overlaps=host_overlaps)
        for depth, seconds in ((0, 0.001), (3, 0.002), (7, 0.006)):
            for _ in range(MIN_SAMPLES):
                costs.add(batch=64, arm=Arm(depth), seconds=seconds)
        assert costs.ratio(64, Arm(3)) == pytest.approx(2)
        costs.add_host(batch=60, arm=Arm(3), seconds=0.003)
        return costs

    beside, between = table(True), table(False)
    assert [beside.cost(64, Arm(depth)) for depth in (0, 3, 7)] == [0.001, 0.002, 0.006], "another size"
    for costs, expected in ((beside, [0.0021, 0.003, 0.006]), (between, [0.0031, 0.005, 0.009])):
        costs.add_host(batch=100, arm=Arm(3), seconds=0.003)  # that of plain steps is a guess
        for twin in (costs, costs.copy()):
            assert [twin.cost(64, Arm(depth)) for depth in (0, 3, 7)] == pytest.approx(expected)
    for _ in range(200):
        beside.add_host(batch=100, arm=Arm(7), seconds=0.0)
    assert beside.cost(64, Arm(3)) == pytest.approx(0.002), "it is learned anew"


def test_the_host_s_work_with_drafts_and_without_is_known_apart() -> None:
    """Where it bounds a step, plain steps are not as dear as those that ran: there is less to do in them."""
    costs = _costs((256, 0, 0.001), (256, 1, 0.0012), (256, 3, 0.0016))
    for _ in range(20):
        costs.add_host(batch=256, arm=Arm(1), seconds=0.005)
    costs.add_host(batch=256, arm=PLAIN, seconds=1.0)  # a stall is no figure, even if nothing else is known
    assert costs.cost(256, PLAIN) < OUTLIER * 0.005
    for _ in range(3):  # as few as a trial has
        costs.add_host(batch=256, arm=PLAIN, seconds=0.002)
    assert costs.cost(256, PLAIN) == pytest.approx(0.0041, rel=0.01)
    for _ in range(40):
        costs.add_host(batch=256, arm=PLAIN, seconds=0.002)
    assert [costs.cost(256, Arm(depth)) for depth in (0, 1, 3)] == pytest.approx([0.002, 0.005, 0.005], rel=0.02)
    assert costs.ratio(256, Arm(1)) == pytest.approx(2.5, rel=0.02)


def test_warming_up_measures_what_rounds_cost() -> None:
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), max_num_seqs=4, policy=AdaptiveDepth(3, 4))
    seen: list[tuple[int, int]] = []
    engine.warm_up(lambda done, total: seen.append((done, total)))
    costs = engine.stats().costs
    assert all(costs.cost(batch, Arm(depth)) for batch in (1, 2, 3, 4) for depth in (0, 1, 2, 3))
    assert seen[-1] == (12, 12)


def test_warming_up_times_graphs_of_their_own_size_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in a larger one would be timed twice; rounds of fewer drafts are timed when they are wanted."""
    policy = AdaptiveDepth(3, 16)
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), max_num_seqs=16, policy=policy, graphs=True)
    timed: list[tuple[int, Arm, RequestKind]] = []
    monkeypatch.setattr(type(engine.runner), "time_round", lambda _, rows, *of: timed.append((len(rows), *of)) or 0.02)
    engine.warm_up()
    greedy, sampled = (
        [batch for batch, arm, of in timed if arm == Arm(3) and of is kind]
        for kind in (RequestKind.GREEDY, RequestKind.SAMPLED)
    )
    assert greedy == sampled == [size for size in (1, 4, 16) for _ in range(4)], "2 and 8 have no graph yet"
    assert engine._costs.tables[RequestKind.SAMPLED].cost(8, Arm(3)) == 0.02, "by what lies around it"


def test_the_first_round_of_a_size_is_no_measure_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), max_num_seqs=2, policy=AdaptiveDepth(3, 2))
    seen: set[tuple[int, Arm, RequestKind]] = set()

    def time_round(_: object, dummies: Sequence[Request], *of: Any) -> float:
        is_first = (len(dummies), *of) not in seen
        seen.add((len(dummies), *of))
        return 0.2 if is_first else 0.002

    monkeypatch.setattr(type(engine.runner), "time_round", time_round)
    engine.warm_up()
    assert {engine._costs.latest.cost(batch, Arm(depth)) for batch in (1, 2) for depth in (0, 1, 2, 3)} == {0.002}


def test_rounds_of_seconds_are_timed_as_few_times_as_it_takes_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), policy=AdaptiveDepth(5, 4), sample_drafts=None)
    clock = iter(range(0, 100, 2))  # of a model so large that each look at it finds two seconds more
    monkeypatch.setattr("fledge.engine.warm_up.time.perf_counter", lambda: float(next(clock)))
    calls: list[tuple[int, Arm, RequestKind]] = []

    def time_round(_: object, dummies: Sequence[Request], *of: Any) -> float:
        calls.append((len(dummies), *of))
        return 2.0 + calls[-1][1].depth

    monkeypatch.setattr(type(engine.runner), "time_round", time_round)
    engine.warm_up()
    assert len(calls) <= 6
    assert {(batch, arm) for batch, arm, _ in calls} == {(1, PLAIN), (1, Arm(1))}
    for kind in RequestKind:
        assert engine._costs.tables[kind].ratio(1, Arm(1)) == pytest.approx(1.5)


def test_rounds_are_timed_as_of_requests_each_in_blocks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), max_num_seqs=2, sample_drafts=None)
    state, seen = engine.runner.state, []
    whole = RoundProgram.run

    def run(program: RoundProgram, *args: Any) -> PassOutcome:
        rows = slice(0, program.batch)
        columns = state.length, state.draft_count, state.sampling.is_greedy, state.sample_drafts
        seen.append((program, *(column[rows].tolist() for column in columns), state.block_tables[rows].clone()))
        return whole(program, *args)

    monkeypatch.setattr(RoundProgram, "run", run)
    engine.warm_up()
    assert {program.batch for program, *_ in seen} == {1, 2}
    for program, lengths, drafts, are_greedy, draws, tables in seen:
        assert set(drafts) == {program.verify.depth}
        assert all(0 < length <= TIMED_LENGTH for length in lengths)
        assert set(are_greedy) == {program.sampling is SamplingMode.GREEDY}
        assert not program.sample_drafts or all(draws)
        used = [
            set(table[: length // state.block_size].tolist()) for table, length in zip(tables, lengths, strict=True)
        ]
        assert len(set.union(*used)) == sum(map(len, used)), "no block is read twice"
    assert any(program.sample_drafts for program, *_ in seen)
    engine.check_integrity()  # the blocks are back


def test_what_was_measured_is_found_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    config = EngineConfig(speculative_config=engine_cases.speculation(3), max_num_seqs=2, num_blocks=60)
    models = engine_cases.target(), engine_cases.drafter()
    assert CostCache.of(*models, config) is None, "tests leave nothing behind"
    monkeypatch.delenv("FLEDGE_COSTS")
    cache, other = (CostCache.of(*models, replace(config, max_num_seqs=seqs)) for seqs in (2, 3))
    assert cache is not None
    assert other is not None
    assert cache.path != other.path
    assert cache.path.parent == tmp_path / "costs"

    def start() -> tuple[LLMEngine, int]:
        """A warm engine, and how many rounds it was to measure."""
        engine, seen = LLMEngine(*models, config, AdaptiveDepth(3, 2), cost_cache=cache), []
        engine.warm_up(lambda _, total: seen.append(total))
        return engine, seen[-1]

    first, measured = start()
    assert measured == 8
    second, measured = start()
    assert measured == 0
    for kind in (RequestKind.GREEDY, RequestKind.SAMPLED):
        before, after = (engine._costs.tables[kind].cost(2, Arm(3)) for engine in (first, second))
        assert before == after != None  # noqa: E711
    whole = cache.path.read_text()
    broken = ['{"written": 0, "rounds": []}', "[1]", "{", whole.replace("greedy", "grey", 1), '{"rounds": 3}']
    with caplog.at_level("DEBUG", "fledge.engine"):
        for text in [*broken, whole.replace('"batch": 1', '"batch": "1"', 1)]:
            cache.path.write_text(text)
            assert start()[1] == 8, text
    assert "damaged" in caplog.text
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]
    cache.path.unlink()
    cache.path.parent.rmdir()
    cache.path.parent.write_text("in the way")
    assert start()[1] == 8


def test_sampled_rounds_have_costs_of_their_own() -> None:
    """Their sampling takes time too, and more of it the more drafts there are."""
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), policy=AdaptiveDepth(3, 4))
    engine.warm_up()
    tables = engine._costs.tables
    assert all(table.cost(1, Arm(3)) for kind, table in tables.items() if kind is not RequestKind.SAMPLED_DRAFTS)
    engine.add_request("a", [2, 3, 4], SamplingParams(max_tokens=40, temperature=1.0, seed=1))
    engine_cases.run(engine)
    assert engine.stats().costs.rounds == tables[RequestKind.SAMPLED].rounds > 0, "those of the rounds that ran"
    engine.add_request("b", [2, 3, 4], SamplingParams(max_tokens=4, temperature=0.0))
    engine_cases.run(engine)
    assert 0 < engine.stats().costs.rounds < 20, "only the greedy ones"
