"""The engine against the reference loop, whatever happens in whatever order.

Hypothesis joins, aborts, steps and changes what is drafted at will, or the costs by which the controller chooses it,
and how many drafts are verified, on pools that are too small, with prompts that share prefixes, with grammars, chains,
chains and trees by turns, with drafts that are sampled for every other request, with keys and values in eight bits,
reading at once or one launch late, with and without (stand-ins for) graphs, prompts in one pass with rounds and apart.
Every request that ends must have the reference's tokens, every aborted one a prefix of them, and between steps every
block and row must be accounted for. FLEDGE_EXPLORE=n runs n random examples instead of the fixed ones, and exchanges
drafters too.
"""

import contextlib
import os
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from fledge.decoding.params import SamplingParams
from fledge.decoding.reference import Speculation
from fledge.engine import work_ahead
from fledge.engine.arms import PLAIN, Arm
from fledge.engine.outputs import RequestUpdate
from fledge.engine.request import Request
from fledge.engine.swap import PreparedDrafter
from fledge.errors import SwapRefusedError
from tests.engine_cases import (
    DRAFTERS,
    EOS,
    MAX_LENGTH,
    TREE,
    VOCAB,
    AnyBudget,
    AnyDepth,
    Ask,
    GivenCosts,
    answer_of,
    drafter,
    make_engine,
    verify_share,
)
from tests.grammar_cases import GRAMMARS, Automaton, Moves, plain
from tests.mixing_cases import mix

EXPLORE = int(os.environ.get("FLEDGE_EXPLORE", "0"))
MAX_DEPTH = 4
COSTS = st.lists(st.sampled_from([0.5, 1.0, 1.3, 2.0, 9.0]), min_size=MAX_DEPTH + 2, max_size=MAX_DEPTH + 2)
ARMS = st.one_of(st.just(PLAIN), st.builds(Arm, st.integers(1, MAX_DEPTH), st.booleans()))
CHOSEN: Counter[Arm] = Counter()  # by the controller, in all runs together
ADMITTED: Counter[bool] = Counter()  # rounds that verified some drafts only, and others
SAT_OUT: Counter[bool] = Counter()  # steps that a request with a grammar sat out while others did not, and others
MIXED: Counter[bool] = Counter()  # steps with prompts that were one pass, and others that might have been
SHARES = st.sampled_from([None, None, 0.0, 0.2, 0.4, 0.5, 0.7, 1.0])  # of the drafts of a round

# Prompts begin alike, so that they find each other's blocks; where they part, the token after a block may differ.
_STEMS = ((2, 3, 4, 5, 0, 2, 3, 4, 5, 0, 2, 3, 3, 0, 5, 4), (2, 3, 4, 5, 1, 1, 2), (5,), (4, 4, 4, 4, 4, 4, 4, 4, 4))
_TOKENS = st.integers(0, VOCAB - 1)
PROMPTS = st.builds(
    lambda stem, cut, tail: (*stem[:cut], *tail)[:24] or stem[:1],
    st.sampled_from(_STEMS),
    st.integers(1, 16),
    st.lists(_TOKENS, max_size=4),
)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": draw(st.integers(1, 20))}
    values["temperature"] = draw(st.sampled_from([0.0, 0.0, 0.7, 1.3]))
    if draw(st.booleans()):
        values |= draw(
            st.sampled_from(
                [
                    {"top_k": 3},
                    {"top_p": 0.8},
                    {"min_p": 0.1},
                    {"top_k": 4, "top_p": 0.9},
                    {"repetition_penalty": 1.3},
                    {"presence_penalty": 0.8, "frequency_penalty": -0.4},
                    {"logit_bias": {0: 1.5, 4: -2.0}},
                    {"min_tokens": min(6, values["max_tokens"])},
                    {"logprobs": 2},
                ]
            )
        )
    if draw(st.integers(0, 3)) == 0:
        values["stop_token_ids"] = draw(st.lists(_TOKENS, min_size=1, max_size=2))
    values["ignore_eos"] = draw(st.booleans())
    return SamplingParams(**values)


ASKS = st.builds(
    Ask,
    prompt=PROMPTS,
    params=sampling_params(),
    seed=st.integers(0, 3),
    speculate=st.sampled_from([True, True, True, False]),
    eos_ids=st.sampled_from([(EOS,), ()]),
)


KINDS = {"chain": 12, "controlled chain": 10, "tree": 8, "controlled tree": 8, "sampled": 5, "plain": 2}  # examples


class EngineMachine(RuleBasedStateMachine):
    kind = ""  # of a subclass: drawn, some kinds would be in a few examples only

    @initialize(
        name=st.sampled_from(sorted(DRAFTERS)),
        drafter_positions=st.sampled_from([MAX_LENGTH, MAX_LENGTH, 20]),
        arm=ARMS,
        block_size=st.sampled_from([1, 2, 4, 8]),
        spare_slots=st.sampled_from([0, 8, 40, 400]),
        seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 5, 16, 100]),
        caching=st.sampled_from([True, True, False]),
        read_late=st.booleans(),
        graphs=st.booleans(),
        costs=COSTS,
        share=SHARES,
        mixing=st.sampled_from([True, True, False]),
        bound=st.sampled_from([None, None, 1, 5]),
    )
    def start(
        self,
        name: str,
        drafter_positions: int,
        arm: Arm,
        block_size: int,
        spare_slots: int,
        seqs: int,
        budget: int,
        caching: bool,
        read_late: bool,
        graphs: bool,
        costs: list[float],
        share: float | None,
        mixing: bool,
        bound: int | None,
    ) -> None:
        kind, self.kv_cache_dtype = self.kind, "fp8" if seqs % 2 == 0 else "auto"
        is_tree = kind.endswith("tree")
        self.change_arm(arm)
        self.drafter = None if kind == "plain" else drafter(name, drafter_positions)
        self.controller: GivenCosts | None = None
        if kind.startswith("controlled"):
            self.controller = GivenCosts(MAX_DEPTH, seqs, tree=is_tree)
            self.controller.chosen = CHOSEN
            self.controller.set_costs(costs)
        lookahead = 3 * (MAX_DEPTH + 1) + 10
        self.max_length = 48
        self.engine = make_engine(
            drafts=self.drafter,
            max_depth=MAX_DEPTH,
            policy=self.controller or AnyDepth(lambda _: self.arm, sampled=lambda one: int(one.id) % 2 == 0),
            tree=TREE if is_tree else None,
            sample_drafts=None if kind == "sampled" else False,
            max_model_len=self.max_length,
            block_size=block_size,
            num_blocks=2 + (self.max_length + lookahead + spare_slots) // block_size,  # one at full length always fits
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            read_late=read_late,
            graphs=graphs,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        if self.engine.admission is not None and kind != "sampled":
            verify_share(self.engine, share).rounds = ADMITTED
        if mixing:
            mix(self.engine, bound).steps = MIXED
        self.asked: list[tuple[Ask, Request]] = []
        self.grammars: dict[str, Moves] = {}
        self.told: defaultdict[str, list[RequestUpdate]] = defaultdict(list)

    @rule(ask=ASKS, grammar=st.sampled_from([None, None, None, *GRAMMARS.values()]))
    def add(self, ask: Ask, grammar: Moves | None = None) -> None:
        name, constraint = str(len(self.asked)), None
        if grammar is not None and self.kind != "sampled":
            self.grammars[name], constraint = grammar, Automaton(grammar)
        self.asked.append((ask, ask.submit(self.engine, name, f"parent-{len(self.asked) // 3}", constraint)))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        """The same prompt once more: everything of it may be cached, or only now be on its way there."""
        self.add(data.draw(st.sampled_from(self.asked))[0])

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            waiting = [one for one in self.engine.scheduler.running if one.drafts is None]
            for update in self.engine.step():
                self.told[update.request_id].append(update)
            launch = self.engine._in_flight
            if waiting and launch is not None:
                SAT_OUT[bool(launch.batch.decoding) and waiting[0] not in launch.batch.decoding] += 1
            self.engine.check_integrity()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        _, request = data.draw(st.sampled_from(self.asked))
        self.engine.abort(request.id)
        self.engine.check_integrity()

    @precondition(lambda self: self.kind != "sampled")  # whose tokens, unlike their distribution, follow the depth
    @rule(arm=ARMS)
    def change_arm(self, arm: Arm) -> None:
        self.arm = arm if self.kind.endswith("tree") else Arm(arm.depth)

    @precondition(lambda self: isinstance(self.engine.admission, AnyBudget))
    @rule(share=SHARES)
    def change_budget(self, share: float | None) -> None:
        assert isinstance(self.engine.admission, AnyBudget)
        self.engine.admission.share = share

    @precondition(lambda self: self.controller is not None)
    @rule(costs=COSTS)
    def change_costs(self, costs: list[float]) -> None:
        assert self.controller is not None
        self.controller.set_costs(costs)

    if EXPLORE:  # the fixed examples cover what is asked for below without it; test_swap.py has fixed ones of this

        @precondition(lambda self: self.drafter is not None and self.kind != "sampled")
        @rule(name=st.sampled_from(sorted(DRAFTERS)), positions=st.sampled_from([MAX_LENGTH, 20]))
        def exchange_drafter(self, name: str, positions: int) -> None:
            made = drafter(name, positions)
            with contextlib.suppress(SwapRefusedError):  # the first one left no room for it
                self.engine.exchange_drafter(PreparedDrafter(name=name, loaded=made, running=made, seconds=0.0))
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_unfinished:
                break
            self.step(1)
        assert not self.engine.has_unfinished, "the engine does not come to an end"
        assert self.engine.block_manager.used == 0
        for ask, request in self.asked:
            speculation = None
            if request.sample_drafts and self.arm.depth and self.drafter is not None:
                speculation = Speculation(drafter=self.drafter, depth=self.arm.depth, sample_drafts=True)
            tokens, reason = (
                plain(ask, self.grammars[request.id], self.max_length, self.kv_cache_dtype)
                if request.id in self.grammars
                else answer_of(ask, speculation, self.max_length, self.kv_cache_dtype)
            )
            if request.finish_reason == "abort":
                assert request.output == tokens[: request.num_output]
            else:
                assert (request.output, request.finish_reason) == (tokens, reason)
            told = [token for update in self.told[request.id] for token in update.token_ids]
            assert told == request.output
            if ask.params.logprobs is not None:
                entries = [entry for update in self.told[request.id] for entry in update.logprobs or ()]
                assert [entry.token for entry in entries] == request.output


def test_the_engine_gives_the_references_tokens_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_ahead, "OFTEN", 1)  # so that some are captured while requests run
    monkeypatch.setattr(work_ahead, "BUSY_SHARE", 1e9)
    advance, ahead = work_ahead.WorkAhead.advance, Counter[bool]()

    def counting(self: work_ahead.WorkAhead) -> bool:
        ahead[found := advance(self)] += 1
        return found

    monkeypatch.setattr(work_ahead.WorkAhead, "advance", counting)
    for kind, examples in KINDS.items():
        run_state_machine_as_test(
            type(f"Engine of {kind}", (EngineMachine,), {"kind": kind}),
            settings=settings(
                max_examples=EXPLORE or examples,
                stateful_step_count=25,
                derandomize=not EXPLORE,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate] if not EXPLORE else tuple(Phase),
            ),
        )
    if EXPLORE:
        return
    assert min(ADMITTED.values()) > 20, ADMITTED
    assert MIXED[True] > 50, MIXED
    assert ahead[True] > 10, ahead  # a graph was captured while requests ran
    assert min(SAT_OUT.values()) > 5, SAT_OUT
    often = {arm for arm in CHOSEN if CHOSEN[arm] > 5}
    assert len(often) > 3, CHOSEN
