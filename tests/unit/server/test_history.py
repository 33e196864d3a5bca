from collections.abc import Mapping
from typing import Any

import pytest

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.arms import Arm
from fledge.engine.controller import DepthChoice
from fledge.engine.costs import MIN_SAMPLES, CostTable
from fledge.engine.protocol import EngineStats
from fledge.server.history import HistoryInterval, SpeculationNote, SpeedupEstimate, estimate_speedup, explain
from fledge.server.prompts import Template


def _costs(*measured: tuple[int, int, float]) -> CostTable:
    """From (batch, depth, seconds) triples, each seen often enough to be believed."""
    table = CostTable()
    for batch, depth, seconds in measured:
        for _ in range(MIN_SAMPLES):
            table.add(batch=batch, arm=Arm(depth), seconds=seconds)
    return table


def _acceptance(*rounds: tuple[int, int, int]) -> AcceptanceStatistics:
    """From (drafted, accepted, rounds) triples."""
    statistics = AcceptanceStatistics()
    for drafted, accepted, times in rounds:
        statistics.add(drafted=drafted, accepted=accepted, rounds=times)
    return statistics


Rounds = Mapping[tuple[int, int], tuple[int, int]]  # (batch, depth) -> rounds, tokens


def _speed_up(rounds: Rounds, costs: CostTable) -> SpeedupEstimate:
    return estimate_speedup(_seen(rounds), EngineStats(costs=costs))


def _seen(rounds: Rounds) -> HistoryInterval:
    seen = HistoryInterval()
    for (batch, depth), (count, tokens) in rounds.items():
        shape = (batch, Arm(depth))
        seen.add({"rounds": {shape: count}, "round_tokens": {shape: tokens}})
    return seen


def _explain(
    rounds: Rounds | None = None,
    acceptance: AcceptanceStatistics | None = None,
    costs: CostTable | None = None,
    templates: Mapping[str, AcceptanceStatistics] | None = None,
    contexts: Mapping[str, AcceptanceStatistics] | None = None,
    has_drafter: bool = True,
    lifetime: AcceptanceStatistics | None = None,
    turns: Mapping[str, int] | None = None,
    **stats: Any,
) -> list[SpeculationNote]:
    """What is said after this was seen of late."""
    seen = _seen(rounds or {})
    parts = {"acceptance": acceptance or AcceptanceStatistics(), **(contexts or {})}
    parts |= {Template(name, ""): part for name, part in (templates or {}).items()}
    seen.add({name: part.tally for name, part in parts.items()} | {"decode_turns": turns or {}})
    ever = lifetime or AcceptanceStatistics()
    return explain(seen, EngineStats(costs=costs or CostTable(), acceptance=ever, **stats), has_drafter=has_drafter)


def _texts(**seen: Any) -> str:
    return "\n".join(note.text for note in _explain(**seen))


def test_speed_up_weighs_tokens_against_cost():
    costs = _costs((8, 0, 0.010), (8, 3, 0.015))
    # 8 requests, 100 rounds, 2.4 tokens each: 240 plain steps' worth in the time of 150.
    estimate = _speed_up({(8, 3): (100, 8 * 240)}, costs)
    assert estimate.value == pytest.approx(1.6)
    assert estimate.tokens_per_round == pytest.approx(2.4)
    assert estimate.break_even == pytest.approx(1.5)
    assert (estimate.batch, estimate.arm) == (8, Arm(3))


def test_speed_up_pools_batches_by_the_time_they_take():
    costs = _costs((1, 0, 0.010), (1, 3, 0.010), (64, 0, 0.020), (64, 3, 0.080))
    rounds = {(1, 3): (100, 200), (64, 3): (100, 12800)}
    # Alone: 2x. In the batch: 2 tokens for 4 steps' cost, 0.5x, and that is where the time goes.
    assert _speed_up(rounds, costs).value == pytest.approx((2.0 + 4.0) / (1.0 + 8.0))


def test_plain_steps_are_as_fast_as_plain_steps_and_no_rounds_mean_unknown():
    costs = _costs((1, 0, 0.01), (1, 3, 0.01))
    assert _speed_up({}, costs).value is None
    assert _speed_up({(1, 0): (50, 50)}, costs).value is None
    mixed = {(1, 0): (50, 50), (1, 3): (10, 30)}
    estimate = _speed_up(mixed, costs)
    assert estimate.value == pytest.approx((50 + 30) / (50 + 10)), "80 tokens in the time of 60 steps"
    assert estimate.tokens_per_round == pytest.approx(3.0), "of rounds with drafts"


def test_speed_up_is_unknown_where_most_rounds_have_no_plain_cost():
    costs = _costs((1, 0, 0.01), (1, 3, 0.01), (32, 3, 0.02))
    rounds = {(1, 3): (10, 30), (32, 3): (90, 5000)}
    estimate = _speed_up(rounds, costs)
    assert estimate.value is None
    assert estimate.break_even is None
    assert estimate.tokens_per_round == pytest.approx(5030 / (10 + 90 * 32))


def test_explains_that_there_is_no_drafter_or_that_it_failed():
    assert "No drafter" in _texts(has_drafter=False)
    failed = _explain(drafter_failure="it broke")
    assert failed[0].level == "bad"
    assert "switched off" in failed[0].text
    assert "Nothing was decoded" in _texts()
    assert "every step was plain" in _texts(rounds={(1, 0): (5, 5)})


def test_says_unknown_and_how_to_find_out():
    (finding,) = _explain(
        rounds={(4, 3): (100, 1000)},
        acceptance=_acceptance((3, 2, 400)),
        costs=_costs((4, 3, 0.01)),
    )
    assert finding.level == "info"
    assert "not known yet" in finding.text
    assert "batch of 4" in finding.text


def test_says_that_it_pays():
    (finding,) = _explain(
        rounds={(1, 3): (100, 300)},
        acceptance=_acceptance((3, 2, 100)),
        costs=_costs((1, 0, 0.010), (1, 3, 0.015)),
    )
    assert finding.level == "good"
    assert "2.00x" in finding.text


def test_names_the_template_the_drafter_does_not_know():
    findings = _explain(
        rounds={(1, 3): (200, 320)},
        acceptance=_acceptance((3, 0, 120), (3, 1, 40), (3, 2, 40)),
        templates={"chatml": _acceptance((3, 2, 40)), "alpaca": _acceptance((3, 0, 120), (3, 1, 40))},
        costs=_costs((1, 0, 0.010), (1, 3, 0.016)),
    )
    assert findings[0].level == "bad"
    (template,) = [finding for finding in findings if "alpaca" in finding.text]
    assert "1.25 tokens per round against a break-even of 1.60" in template.text
    assert "does not know this template" in template.text
    assert not any("chatml:" in finding.text for finding in findings)


def test_templates_with_few_rounds_are_left_out():
    assert "rare" not in _texts(
        rounds={(1, 3): (100, 300)},
        acceptance=_acceptance((3, 2, 100)),
        templates={"rare": _acceptance((3, 0, 5))},
        costs=_costs((1, 0, 0.010), (1, 3, 0.015)),
    )


def test_blames_the_batch_where_small_ones_would_pay():
    text = _texts(
        rounds={(64, 3): (100, 64 * 180)},
        acceptance=_acceptance((3, 0, 30), (3, 1, 60), (3, 2, 10)),
        costs=_costs((1, 0, 0.010), (1, 3, 0.012), (64, 0, 0.010), (64, 3, 0.021)),
    )
    assert "Batch of 64: rounds cost 2.1x a step, against 1.2x at a batch of 1" in text
    assert "num_speculative_tokens_per_batch_size" in text


def test_does_not_blame_the_batch_where_no_batch_would_pay():
    assert "Batch of" not in _texts(
        rounds={(64, 3): (100, 64 * 110)},
        acceptance=_acceptance((3, 0, 90), (3, 1, 10)),
        costs=_costs((1, 0, 0.010), (1, 3, 0.012), (64, 0, 0.010), (64, 3, 0.021)),
    )


def test_names_the_context_length_and_the_useless_depths():
    text = _texts(
        rounds={(1, 3): (200, 280)},
        acceptance=_acceptance((3, 0, 140), (3, 1, 50), (3, 2, 8), (3, 3, 2)),
        contexts={"up to 512": _acceptance((3, 2, 60)), "over 32768": _acceptance((3, 0, 140))},
        costs=_costs((1, 0, 0.010), (1, 3, 0.016)),
    )
    assert "Contexts of over 32768 tokens: 1.00 tokens per round" in text
    assert "Drafts beyond depth 1" in text
    assert '"num_speculative_tokens": 1' in text


def test_a_drafter_that_is_never_right_is_suspected_to_be_the_wrong_one():
    assert "fledge inspect" in _texts(
        rounds={(1, 3): (100, 101)},
        acceptance=_acceptance((3, 0, 99), (3, 1, 1)),
        costs=_costs((1, 0, 0.010), (1, 3, 0.016)),
    )


def test_a_wrong_drafter_that_is_no_longer_used_is_still_told_of():
    lifetime = _acceptance((3, 0, 99), (3, 1, 1))
    notes = _explain(rounds={(1, 0): (100, 100)}, lifetime=lifetime)
    assert [note.level for note in notes] == ["bad", "info"]
    assert "fledge inspect" in notes[0].text
    assert "fledge inspect" not in _texts(rounds={(1, 0): (100, 100)}, lifetime=_acceptance((3, 1, 100)))


def _choice(
    depth: int, reason: str = "best", tokens: float | None = 2.1, cost: float | None = 1.4, **more: Any
) -> DepthChoice:
    arm = Arm(depth, is_tree=more.pop("is_tree", False))
    return DepthChoice(arm=arm, batch=16, tokens=tokens, cost=cost, shown=Arm(3), reason=reason, **more)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (_choice(3), "drafts 3 tokens ahead: at a batch of 16 such a round is expected to give 2.10 tokens"),
        (_choice(1), "drafts 1 token ahead"),
        (_choice(5, is_tree=True, sampled_drafts=4), "drafts a tree of 5 levels"),
        (_choice(3, sampled_drafts=4), "without a seed of their own (4 of 16) have sampled drafts"),
        (_choice(0, cost=2.4), "as fast as without a drafter: at a batch of 16 a round that drafts 3 tokens ahead"),
        (_choice(0, "return"), "would have to read first what it has missed"),
        (_choice(5, "trial"), "drafts 5 tokens ahead for a few rounds"),
        (_choice(3, "unmeasured", None, None), "is measuring what rounds cost"),
    ],
)
def test_what_the_controller_does_is_said_and_why(choice: DepthChoice, said: str) -> None:
    assert said in _texts(rounds={(16, 0): (10, 160)}, choice=choice)
    drafted = {"rounds": {(16, 3): (10, 320)}, "acceptance": _acceptance((3, 1, 160)), "choice": choice}
    assert said in _texts(**drafted)
    assert "num_speculative_tokens" not in _texts(**drafted), "nobody need set what is chosen"


def test_what_the_controller_expects_is_the_estimate_where_nothing_else_tells() -> None:
    nothing = HistoryInterval()
    assert estimate_speedup(nothing, EngineStats(choice=_choice(3))).value == pytest.approx(1.5)
    assert estimate_speedup(nothing, EngineStats(choice=_choice(0))).value == 1.0
    assert estimate_speedup(_seen({(8, 3): (100, 1920)}), EngineStats(choice=_choice(3))).value == pytest.approx(1.5)


def test_what_the_controller_holds_back_is_no_loss() -> None:
    costs = _costs((1, 0, 0.010), (1, 3, 0.030))
    rounds = {(1, 0): (960, 960), (1, 3): (20, 40)}
    seen = {"rounds": rounds, "acceptance": _acceptance((3, 1, 40)), "costs": costs, "choice": _choice(0)}
    assert "costs more than it saves" in _texts(**seen | {"rounds": {(1, 3): (40, 80)}})
    notes = _explain(**seen, turns={"plain": 960, "speculative": 40})
    assert notes[0].level == "info"
    assert "96% of the turns had no drafts" in notes[0].text
    assert "0.98x the speed" in notes[0].text
