from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.bench.load.client import SpeculationCounters, read_metrics, tally_between, tally_of, tally_of_report
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.protocol import EngineStats
from fledge.server.metrics import Metrics

ROUND = st.integers(1, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 45.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 17.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="0"} 1.7e+09
"""


def counters(rounds: int, accepted: tuple[int, ...], drafted: tuple[int, ...] = ()) -> SpeculationCounters:
    found = {("drafts", 0): rounds}
    found |= {("accepted_tokens_per_pos", i): count for i, count in enumerate(accepted)}
    return Counter(found | {("draft_tokens_per_pos", i): count for i, count in enumerate(drafted)})


def statistics(tally: tuple[tuple[int, int, int], ...]) -> AcceptanceStatistics:
    return AcceptanceStatistics(tally=Counter({(drafted, accepted): rounds for drafted, accepted, rounds in tally}))


def test_vllm_metrics_are_read_over_all_engines() -> None:
    assert read_metrics(VLLM) == counters(15, (13, 4, 0))
    assert read_metrics("vllm:generation_tokens_total 5\n") is None


def test_rounds_by_length_follow_from_counts_by_position() -> None:
    assert tally_of(15, (13, 4, 0)) == ((3, 0, 2), (3, 1, 9), (3, 2, 4))
    assert statistics(tally_of(15, (13, 4, 0))).acceptance_length == 1 + 17 / 15


def test_a_cell_has_only_the_rounds_between_two_readings() -> None:
    before = counters(5, (3,))
    after = counters(15, (13, 4))
    assert tally_between(before, after) == ((2, 1, 6), (2, 2, 4))
    assert tally_between(after, after) == ()
    with pytest.raises(ValueError, match="contradict"):
        tally_between(after, before)  # restarted in between


@given(st.lists(ROUND))
def test_our_report_and_our_metrics_give_back_the_figures(rounds: list[tuple[int, int]]) -> None:
    true = AcceptanceStatistics(tally=Counter(rounds))
    for found in (
        statistics(tally_of_report(true.to_dict())),
        statistics(tally_of(true.rounds, true.accepted_by_depth, true.drafted_by_depth)),
    ):
        assert found.rounds == true.rounds
        assert found.acceptance_length == true.acceptance_length
        assert found.rate_by_depth == true.rate_by_depth


@given(st.lists(st.integers(0, 4)))
def test_at_one_depth_the_very_tally_comes_back(accepted: list[int]) -> None:
    true = AcceptanceStatistics(tally=Counter((4, a) for a in accepted))
    drafted, lengths = true.drafted_by_depth, true.accepted_by_depth
    assert statistics(tally_of(true.rounds, lengths, drafted)).tally == true.tally
    if accepted:
        assert statistics(tally_of(true.rounds, lengths)).tally == true.tally


def test_our_servers_own_exposition_is_understood() -> None:
    metrics = Metrics(model_name="m", has_drafter=True)
    tally = Counter({(3, 1): 4, (3, 3): 2, (2, 0): 1})
    metrics.on_stats(EngineStats(acceptance=AcceptanceStatistics(tally=tally)))
    found = read_metrics(metrics.render().decode())
    assert found == counters(7, (6, 2, 2), (7, 7, 6))


@pytest.mark.parametrize(
    "report",
    [{}, {"rounds": 1}, {"rounds": 2, "accepted_by_depth": [3], "drafted_by_depth": [2]}, {"rounds": None}],
)
def test_a_senseless_report_is_no_report(report: dict[str, object]) -> None:
    assert tally_of_report(report) == ()


def test_more_accepted_than_drafted_is_refused() -> None:
    with pytest.raises(ValueError, match="contradict"):
        tally_of(2, (2, 2), (2, 0))
