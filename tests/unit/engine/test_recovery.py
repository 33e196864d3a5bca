"""Steps that fail: the request at fault ends alone, the drafter can be lost, and everybody else gets their tokens."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fledge.decoding.drafting import TreeShape
from fledge.engine.engine import NOT_FINITE, LLMEngine
from fledge.engine.protocol import DeadEngineError
from fledge.engine.scheduler import ScheduledBatch
from fledge.models.drafter.base import Drafter, DraftStates
from tests.engine_cases import VOCAB, Ask, answer_of, answers, drafter, greedy, make_engine, run, sampled, target
from tests.mixing_cases import mix

ASKS = [greedy([2, 3, 4], 20), sampled([3, 3, 2, 5], 18, seed=4), greedy([4, 2], 25), sampled([5, 4, 2], 16, seed=9)]
LATE = pytest.mark.parametrize("read_late", [False, True])


def expect(asks: list[Ask]) -> list[list[int]]:
    return [answer_of(ask)[0] for ask in asks]


@pytest.fixture(name="own_drafter")
def _own_drafter() -> Iterator[Drafter]:
    """The drafter that other tests share, with its forward pass given back afterwards."""
    made = drafter()
    yield made
    made.__dict__.pop("forward", None)


def breaks(made: Drafter, at_call: int, how: Callable[[DraftStates], DraftStates]) -> None:
    """From its `at_call`-th forward pass on, the drafter returns what `how` makes of its states, or raises."""
    original, calls = type(made).forward, [0]

    def forward(*args: Any) -> DraftStates:
        states: DraftStates = original(made, *args)
        calls[0] += 1
        return how(states) if calls[0] >= at_call else states

    made.__dict__["forward"] = forward


def raises(_states: DraftStates) -> DraftStates:
    raise RuntimeError("no such kernel\nsecond line")


def not_a_number(states: DraftStates) -> DraftStates:
    return DraftStates(**{name: state * torch.nan for name, state in vars(states).items()})


def infinite(states: DraftStates) -> DraftStates:
    return replace(states, head=states.head + torch.inf)


SETTINGS = ({}, {"tree": TreeShape(width=2, budget=5)}, {"sample_drafts": True})
HOW = (raises, not_a_number, infinite)
AT_CALL = (1, 7, 11)
# A Latin square: each of the settings with each failure, both with each moment, and one of each three read late.
FAILURES = [(SETTINGS[i], HOW[j], AT_CALL[(i + j) % 3], i == j) for i in range(3) for j in range(3)]


@pytest.mark.parametrize(("settings", "how", "at_call", "read_late"), FAILURES)
def test_a_drafter_that_fails_costs_nobody_a_token(
    own_drafter: Drafter, settings: dict[str, Any], how: Callable[..., Any], at_call: int, read_late: bool
) -> None:
    asks = ASKS if "sample_drafts" not in settings else [ASKS[0], ASKS[2]]  # rejection draws other tokens
    breaks(own_drafter, at_call, how)
    engine = make_engine(drafts=own_drafter, read_late=read_late, **settings)
    assert answers(engine, asks) == expect(asks)
    assert engine.stats().drafter_failure is not None
    assert engine.stats().failed == 0
    rounds = engine.stats().acceptance.rounds
    assert answers(engine, asks) == expect(asks)  # from the prefix cache, and for good without drafts
    assert engine.stats().acceptance.rounds == rounds


def test_sampled_drafts_of_a_broken_drafter_come_from_a_distribution(own_drafter: Drafter) -> None:
    breaks(own_drafter, 3, not_a_number)
    engine = make_engine(drafts=own_drafter, sample_drafts=True, read_late=True)
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(ASKS)]
    while engine.has_unfinished:
        engine.step()
        assert engine.runner.state.draft_probs.isfinite().all()
    assert all(0 <= token < VOCAB for request in requests for token in request.output)


def test_the_reason_is_one_line_and_is_logged(own_drafter: Drafter, caplog: pytest.LogCaptureFixture) -> None:
    breaks(own_drafter, 1, raises)
    engine = make_engine(drafts=own_drafter)
    answers(engine, ASKS[:1])
    assert engine.stats().drafter_failure == "RuntimeError: no such kernel"
    assert "goes on without speculation" in caplog.text


def fails_with(engine: LLMEngine, name: str, *, after: int, half_done: bool) -> None:
    """Every launch with a decoding request of that name and `after` tokens fails, before or after it is computed."""
    original = engine.runner.launch

    def launch(batch: ScheduledBatch) -> Any:
        bad = any(request.id == name and request.num_output >= after for request in batch.decoding)
        if bad and not half_done:
            raise ValueError("bad request")
        launched = original(batch)
        if bad:
            raise ValueError("bad request")
        return launched

    engine.runner.launch = launch  # type: ignore[method-assign]


def any_suspect(engine: LLMEngine) -> bool:
    return any(request.is_suspect for request in engine.requests.values())


@LATE
@pytest.mark.parametrize("half_done", [False, True])
@pytest.mark.parametrize("settings", [{}, {"num_blocks": 30, "max_num_batched_tokens": 3}, {"max_num_seqs": 2}])
def test_the_request_at_fault_ends_alone(read_late: bool, half_done: bool, settings: dict[str, Any]) -> None:
    engine = make_engine(drafts=drafter(), read_late=read_late, **settings)
    fails_with(engine, "1", after=3, half_done=half_done)
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(ASKS)]
    updates = run(engine)
    expected = expect(ASKS)
    assert requests[1].finish_reason == "error"
    assert requests[1].failure == "computing it failed: ValueError: bad request"
    assert requests[1].output == expected[1][: requests[1].num_output]
    for i in (0, 2, 3):
        assert requests[i].output == expected[i]
        told = [token for update in updates if update.request_id == str(i) for token in update.token_ids]
        assert told == expected[i]  # each token once, in order
    assert [u.finish_reason for u in updates if u.request_id == "1"][-1] == "error"
    assert engine.stats().failed == 1
    assert engine.stats().drafter_failure is None
    assert answers(engine, ASKS[:1]) == expected[:1]


def test_requests_that_come_while_suspects_are_tried_wait_and_are_served() -> None:
    engine = make_engine(drafts=drafter())
    fails_with(engine, "3", after=2, half_done=True)
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(ASKS)]
    while not any_suspect(engine):
        engine.step()
    late = greedy([2, 2, 3], 10)
    requests.append(late.submit(engine, "late"))
    while any_suspect(engine):
        assert sum(request.is_suspect for request in engine.scheduler.running) <= 1, "they are tried one by one"
        assert requests[-1] in engine.scheduler.waiting
        engine.abort("0")  # the first to be tried
        engine.step()
    run(engine)
    assert requests[4].output == answer_of(late)[0]
    assert [request.finish_reason for request in requests] == ["abort", "length", "length", "error", "length"]


@LATE
def test_a_failure_that_does_not_come_back_fails_nobody(read_late: bool) -> None:
    engine = make_engine(drafts=drafter(), read_late=read_late)
    original, launches, times = engine.runner.launch, [0], {4, 22}

    def launch(batch: ScheduledBatch) -> Any:
        launches[0] += 1
        if launches[0] in times and not any_suspect(engine):
            raise MemoryError
        return original(batch)

    engine.runner.launch = launch  # type: ignore[method-assign]
    assert answers(engine, ASKS) == expect(ASKS)
    assert (engine.stats().failed, engine.stats().failed_steps) == (0, 2)


@LATE
def test_reading_may_fail_too(read_late: bool) -> None:
    engine = make_engine(drafts=drafter(), read_late=read_late)
    original, reads = engine.runner.read, [0]

    def read(launch: Any) -> Any:
        reads[0] += 1
        if reads[0] == 5:
            raise RuntimeError("the device stumbled")
        return original(launch)

    engine.runner.read = read  # type: ignore[method-assign]
    assert answers(engine, ASKS) == expect(ASKS)


def test_when_every_step_fails_every_request_fails_and_the_engine_lives_on() -> None:
    engine = make_engine(drafts=drafter())
    original = engine.runner.launch

    def launch(_batch: ScheduledBatch) -> Any:
        raise RuntimeError("nothing works")

    engine.runner.launch = launch  # type: ignore[method-assign]
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(ASKS)]
    run(engine, limit=100)
    assert all(request.finish_reason == "error" for request in requests)
    engine.runner.launch = original  # type: ignore[method-assign]
    assert answers(engine, ASKS) == expect(ASKS)


def test_an_engine_that_cannot_take_a_step_back_says_that_it_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(drafts=drafter())
    ASKS[0].submit(engine, "a")
    monkeypatch.setattr(engine.runner, "launch", lambda _batch: 1 / 0)
    monkeypatch.setattr(engine.scheduler, "restart", lambda _alive: {}["a"])
    with pytest.raises(DeadEngineError, match=r"cannot go on after ZeroDivisionError: .*KeyError"):
        engine.step()


@pytest.fixture(name="poison")
def _poison() -> Iterator[int]:
    """A token whose embedding is not a number, and that the drafter has no word for."""
    vocabulary = drafter("reduced-vocabulary").vocabulary
    assert vocabulary is not None
    token = next(t for t in range(VOCAB) if t not in vocabulary.target_ids.tolist() and t != 2)
    weight = target().embed_tokens.weight
    kept = weight[token].clone()
    weight[token] = torch.nan
    yield token
    weight[token] = kept


@LATE
@pytest.mark.parametrize(("speculative", "one_pass"), [(False, False), (True, False), (True, True)])
def test_bad_numerics_end_one_request_and_leave_nothing_behind(
    poison: int, read_late: bool, speculative: bool, one_pass: bool
) -> None:
    well = [token for token in range(VOCAB) if token != poison]
    ban = {"logit_bias": {str(poison): -100.0}}
    asks = [greedy(well[:3], 20, **ban), sampled(well[1:] + well, 18, seed=4, **ban), greedy(well[3:], 25, **ban)]
    sick = greedy([*well, poison, *well, *well], 10)
    made = drafter("reduced-vocabulary") if speculative else None
    engine = make_engine(
        drafts=made,
        read_late=read_late,
        num_blocks=40,  # few: those of the sick are used again
        max_num_seqs=3 if one_pass else 4,  # it comes while others decode
    )
    mixing = mix(engine) if one_pass else None
    for turn in range(2):
        requests = [ask.submit(engine, f"{turn}-{i}") for i, ask in enumerate([*asks, sick])]
        run(engine)
        assert [request.output for request in requests[:3]] == expect(asks)
        assert (requests[3].finish_reason, requests[3].failure) == ("error", NOT_FINITE)
        assert requests[3].output == []
        assert requests[3].cached_tokens == 0  # its blocks cannot be found
    assert engine.runner.state.target_cache.values[:, 1:].isfinite().all()
    assert mixing is None or mixing.steps[True] >= 2
    assert engine.stats().failed == 2
    assert engine.stats().drafter_failure is None  # it had nothing to go by
