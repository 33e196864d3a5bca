"""Figures from rounds that are written down here, with the arithmetic beside them."""

from collections.abc import Sequence

import pytest
import torch

from fledge.decoding.statistics import Overlap
from fledge.drift.metrics import DriftSums, judge
from fledge.drift.prompts import LABELS, Segment
from fledge.drift.replay import Replayed
from fledge.drift.result import PromptRow
from fledge.engine.outputs import RoundRecord

TEXT = [9, 9, 9, 1, 2, 3, 4, 5]  # places 0 to 7
NOVEL = Overlap.of(TEXT[:3], TEXT[3:])


def made(starts: Sequence[int], drafts: Sequence[Sequence[int]], **changes: torch.Tensor) -> Replayed:
    """Rounds with one layer and two heads, in which everything not given is plain."""
    rounds, depth = len(starts), len(drafts[0])
    even = torch.ones(rounds, depth)
    mass = torch.zeros(rounds, depth, 1, 2, len(Segment))
    mass[..., Segment.SINK] = 1.0
    visible = torch.zeros(rounds, depth, len(Segment), dtype=torch.int64)
    visible[..., Segment.SINK] = 1
    visible[..., Segment.OUTPUT] = 3
    values = {
        "starts": torch.tensor(starts),
        "drafts": torch.tensor(drafts),
        "confidence": even * 0.5,
        "hidden_rms": even,
        "head_rms": even,
        "feature_rms": even,
        "head_cosine": even * 0.5,
        "feature_cosine": even * 0.25,
        "mass": mass,
        "recent": torch.full((rounds, depth, 1, 2), 0.75),
        "entropy": torch.zeros(rounds, depth, 1, 2),
        "distance": torch.zeros(rounds, depth, 1, 2),
        "visible": visible,
        "fused_rms": torch.ones(rounds),
        "contributions": torch.ones(rounds, 2),
    }
    return Replayed(**{**values, **changes})


def record(start: int, drafted: int, accepted: int) -> RoundRecord:
    return RoundRecord(start=start, drafted=drafted, accepted=accepted)


def test_a_draft_is_judged_only_after_right_ones() -> None:
    replayed = made([3, 4], [[1, 7, 3], [2, 3, 4]])
    judged = judge(replayed, TEXT, [record(3, 3, 1), record(4, 3, 3)], limit=100)
    assert judged.reached.tolist() == [[True, True, False], [True, True, True]]
    assert judged.right.tolist() == [[True, False, False], [True, True, True]]  # 3 is at its place, after a wrong 7
    assert judged.comparable.tolist() == judged.reached.tolist()
    assert judged.outcomes == ((3, 1), (3, 3))


def test_beyond_the_engines_depth_the_text_decides() -> None:
    drafts = [[1, 2, 3, 4], [1, 2, 8, 4], [7, 2, 3, 4], [2, 3, 4, 5]]
    records = [record(3, 2, 2), record(3, 2, 2), record(3, 2, 0), record(4, 2, 2)]
    judged = judge(made([3, 3, 3, 4], drafts), TEXT, records, limit=100)
    assert judged.outcomes == ((4, 4), (4, 2), (4, 0), (4, 4))


def test_drafts_after_the_end_of_the_text_count_for_nothing() -> None:
    replayed = made([6, 6, 7], [[4, 5, 1, 1], [4, 7, 1, 1], [5, 0, 0, 0]])
    judged = judge(replayed, TEXT, [record(6, 1, 1), record(6, 1, 1), record(7, 4, 3)], limit=100)
    assert judged.reached.tolist() == [
        [True, True, False, False],
        [True, True, False, False],
        [True, False, False, False],
    ]
    # The target has read the whole text, so the state one further can be compared.
    assert judged.comparable[0].tolist() == [True, True, True, False]
    # The engine accepted three at place 7, of which two were trimmed: its word counts.
    assert judged.outcomes == ((2, 2), (4, 1), (4, 3))


def test_nothing_is_drafted_where_there_is_no_room() -> None:
    judged = judge(made([4], [[2, 3, 4, 5]]), TEXT, [record(4, 2, 2)], limit=7)
    assert judged.drafted.tolist() == [[True, True, False, False]]
    assert judged.outcomes == ((2, 2),)


def test_rounds_that_begin_in_repetition_or_a_copy_are_counted_apart() -> None:
    sums = DriftSums(2, ["a", "b"], None)
    overlap = Overlap(3, repeated=[False, True, True, False, False], copied=[True, False, False, False, False])
    records = [record(3, 2, 1), record(5, 2, 2), record(8, 2, 0)]  # the last begins where the text ends
    measured = sums.add(made([3, 5, 8], [[1, 7], [3, 4], [1, 1]]), TEXT, records, 100, overlap)
    assert measured["tally"] == ((2, 0, 1), (2, 1, 1), (2, 2, 1))
    assert measured["fresh_tally"] == sums.figures()["fresh_tally"] == ((2, 0, 1), (2, 1, 1))
    assert measured["novel_tally"] == ((2, 0, 1),)
    assert [depth.acceptance for depth in sums.figures()["by_depth"]] == [0.5, 0.0]


def test_means_by_depth() -> None:
    sums = DriftSums(2, ["low", "high"], None)
    mass = torch.zeros(2, 2, 1, 2, len(Segment))
    mass[:, 0, :, :, Segment.SINK] = 1.0
    mass[:, 1, 0, 0, Segment.DRAFTED] = torch.tensor([1.0, 0.5])
    mass[:, 1, 0, 0, Segment.SINK] = torch.tensor([0.0, 0.5])
    mass[:, 1, 0, 1, Segment.USER] = 1.0
    entropy = torch.tensor(4.0).log() * torch.tensor([[[[0.0, 1.0]], [[0.5, 0.5]]]] * 2)
    replayed = made(
        [3, 4],
        [[1, 2], [2, 9]],
        mass=mass,
        entropy=entropy,
        distance=torch.tensor([[[[2.0, 4.0]], [[1.0, 1.0]]], [[[4.0, 6.0]], [[1.0, 3.0]]]]),
        hidden_rms=torch.tensor([[2.0, 4.0], [2.0, 6.0]]),
        contributions=torch.tensor([[1.0, 3.0], [1.0, 1.0]]),
    )
    sums.add(replayed, TEXT, [record(3, 2, 2), record(4, 2, 1)], 100, NOVEL)
    first, second = sums.figures()["by_depth"]
    assert (first.depth, first.rounds, second.depth) == (1, 2, 2)
    assert first.attention.mass == {label: float(label == "sink") for label in LABELS}
    assert second.attention.mass["drafted"] == pytest.approx((1.0 + 0.5) / 2 / 2)
    assert second.attention.mass["user"] == 0.5
    assert [head.attention.mass["drafted"] for head in second.heads] == [0.75, 0.0]
    assert [(head.layer, head.head) for head in second.heads] == [(0, 0), (0, 1)]
    assert first.attention.normalised_entropy == pytest.approx(0.5)  # heads at 0 and at log 4 of 4 visible rows
    assert first.attention.distance == 4.0
    assert first.uniform_mass["output"] == 0.75
    assert (first.hidden_growth, second.hidden_growth) == (1.0, 2.5)
    assert (second.hidden_rms, second.feature_growth) == (5.0, 1.0)
    assert (first.acceptance, first.conditional_acceptance) == (1.0, 1.0)
    assert (second.acceptance, second.conditional_acceptance, second.reached, second.missed) == (0.5, 0.5, 2, 1)
    assert (second.head_cosine, second.feature_cosine) == (0.5, 0.25)
    assert [(share.part, share.share) for share in sums.figures()["fusion_shares"]] == [("low", 0.375), ("high", 0.625)]
    assert sums.figures()["fusion_shares"][1].norm == 2.0
    assert sums.figures()["fused_rms"] == 1.0


def test_cosines_are_of_rounds_whose_drafts_before_are_right() -> None:
    cosine = torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.6, torch.nan]])
    sums = DriftSums(3, [], None)
    sums.add(
        made([3, 6], [[8, 2, 3], [4, 5, 1]], head_cosine=cosine, contributions=torch.ones(2, 0)),
        TEXT,
        [record(3, 3, 0), record(6, 3, 2)],
        100,
        NOVEL,
    )
    found = [depth.head_cosine for depth in sums.figures()["by_depth"]]
    assert found[:2] == pytest.approx([0.3, 0.6])  # at depth 2 the first round has gone wrong
    assert found[2] is None


def test_misses_that_no_draft_could_have_avoided() -> None:
    in_draft = torch.ones(10, dtype=torch.bool)
    in_draft[2] = False
    sums = DriftSums(2, ["a", "b"], in_draft)
    sums.add(
        made([3, 4, 5], [[1, 7], [8, 3], [7, 4]]), TEXT, [record(3, 2, 1), record(4, 2, 0), record(5, 2, 0)], 100, NOVEL
    )
    assert [(d.missed, d.missed_outside_vocabulary) for d in sums.figures()["by_depth"]] == [(2, 1), (1, 1)]


def test_calibration() -> None:
    confidence = torch.tensor([[0.95, 0.15], [0.85, 1.0], [0.95, 0.0]])
    sums = DriftSums(2, ["a", "b"], None)
    records = [record(3, 2, 1), record(4, 2, 2), record(5, 2, 0)]
    sums.add(made([3, 4, 5], [[1, 7], [2, 3], [7, 4]], confidence=confidence), TEXT, records, 100, NOVEL)
    first, second = (depth.calibration for depth in sums.figures()["by_depth"])
    assert [found.count for found in first.bins] == [0] * 8 + [1, 2]
    assert (first.bins[9].confidence, first.bins[9].right) == (pytest.approx(0.95), 0.5)
    assert first.bins[0].confidence is None
    assert first.error == pytest.approx((1 * abs(0.85 - 1) + 2 * abs(0.95 - 0.5)) / 3)
    # The last round missed at depth 1: what it is sure of at depth 2 is not judged.
    assert [found.count for found in second.bins] == [0, 1, *[0] * 7, 1]
    assert second.error == pytest.approx(0.15 / 2)
    assert sum(found.count for found in sums.figures()["calibration"].bins) == 5
    assert first.bins[9].high == 1.0


def test_depths_that_few_rounds_have_room_for() -> None:
    rms = torch.tensor([[1.0, 2.0, 3.0], [3.0, 7.0, 8.0]])
    recent = torch.tensor([0.5, 0.7])[:, None, None, None] * torch.tensor([0.5, 1.5])  # of two rounds and two heads
    replayed = made([3, 4], [[1, 2, 3], [2, 3, 4]], feature_rms=rms, recent=recent.expand(2, 3, 1, 2))
    sums = DriftSums(3, ["a", "b"], None)
    measured = sums.add(replayed, TEXT, [record(3, 2, 2), record(4, 1, 1)], 6, NOVEL)
    second = sums.figures()["by_depth"][1]
    assert len(sums.figures()["by_depth"]) == 2  # nobody has room for a third
    assert (second.rounds, second.feature_rms, second.feature_growth) == (1, 2.0, 2.0)
    row = PromptRow(id="p", category="c", prompt_tokens=3, output_tokens=5, repeated_tokens=0, **measured)
    assert row.rounds_by_depth == (2, 1, 0)
    assert row.sink_attention == (1.0, 1.0, None)
    assert row.recent_attention == (pytest.approx(0.6), pytest.approx(0.5), None)
    assert second.recent_attention == pytest.approx(0.5)
    assert [head.attention.recent for head in second.heads] == pytest.approx([0.25, 0.75])
    assert [row.to_dict()[name] for name in ("rounds", "drafted", "accepted")] == [2, 3, 3]


def test_nothing_to_report() -> None:
    sums = DriftSums(2, ["a"], None)
    assert sums.figures()["by_depth"] == ()
    assert sums.figures()["fusion_shares"] == ()
    assert sums.figures()["fused_rms"] is None
    assert sums.figures()["calibration"].error is None
    row = PromptRow(id="p", category="c", prompt_tokens=3, output_tokens=1, repeated_tokens=0, **sums.unmeasured)
    assert (row.acceptance.rounds, row.rounds_by_depth, row.sink_attention) == (0, (0, 0), (None, None))
