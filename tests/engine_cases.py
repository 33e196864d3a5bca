"""Tiny pairs in float64, what may be asked of them, and what the reference loop answers: for tests of the engine.

float64, so that two ways to compute the same logits cannot disagree about a near-tie. Six tokens, so that an untrained
drafter is right often enough for its every row to matter.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fledge.decoding import reference
from fledge.decoding.drafting import TreeShape
from fledge.decoding.params import SamplingParams
from fledge.decoding.reference import Round, Speculation
from fledge.engine.admission import AdmissionPolicy, Budgets
from fledge.engine.arms import PLAIN, Acceptance, Arm
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.engine.constraint import TokenConstraint
from fledge.engine.controller import AdaptiveDepth, DepthPolicy, wanted_depth
from fledge.engine.costs import MIN_SAMPLES, CostTable, RoundCosts
from fledge.engine.engine import LLMEngine
from fledge.engine.graphs import GraphRunner, batch_sizes
from fledge.engine.outputs import RequestUpdate
from fledge.engine.request import Request
from fledge.kernels.cache_codes import FP8
from fledge.layers.dense_cache import DenseCache
from fledge.models.config import DrafterConfig
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel, TargetStates
from tests.tiny_models import TINY_LAYER, TINY_TARGET, drafter_configs, make_drafter, make_target

T = TypeVar("T")

VOCAB = 6
EOS = 1
MAX_LENGTH = 64
_LAYER = replace(TINY_LAYER, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1)
TARGET = replace(TINY_TARGET, vocab_size=VOCAB, num_layers=3, layer=_LAYER, max_positions=MAX_LENGTH, eos_ids=(EOS,))
TREE = TreeShape(width=2, budget=5)


def _drafters() -> dict[str, DrafterConfig]:
    configs = drafter_configs(TARGET)
    configs["four-aux-states"] = replace(configs["four-aux-states"], aux_layer_ids=(0, 1, 2, 3))
    configs["narrow"] = replace(configs["narrow"], layer=replace(_LAYER, hidden_size=8, intermediate_size=8))
    return configs


DRAFTERS = _drafters()


@functools.cache
@torch.inference_mode(False)  # whoever asks first: tests change these weights
def target() -> TargetModel:
    return make_target(TARGET).double()


@functools.cache
@torch.inference_mode(False)
def drafter(name: str = "eagle3.1", max_positions: int = MAX_LENGTH) -> Drafter:
    made = make_drafter(replace(DRAFTERS[name], max_positions=max_positions), make_target(TARGET), seed=2).double()
    made.share_with(target())
    return made


def next_logits(tokens: Sequence[int], kv_cache_dtype: str = "auto") -> Tensor:
    """The target's logits after a text, read from the start."""
    positions, dtype = torch.arange(len(tokens)), FP8 if kv_cache_dtype == "fp8" else None
    storage = DenseCache(target().config.num_layers, torch.device("cpu"), dtype=dtype).extend(positions)
    with torch.no_grad():
        return target().logits(target()(torch.tensor(tokens), positions, storage, ()).final[-1:])


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request, as a test writes it down."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0, max_tokens=12))
    seed: int = 0
    speculate: bool = True
    eos_ids: tuple[int, ...] = (EOS,)

    def submit(
        self, engine: LLMEngine, request_id: str, parent: str = "", constraint: TokenConstraint | None = None
    ) -> Request:
        return add_request(
            engine,
            request_id,
            self.prompt,
            self.params,
            seed=self.seed,
            eos_ids=self.eos_ids,
            draft_limit=None if self.speculate else 0,
            parent=parent,
            constraint=constraint,
        )


def add_request(engine: LLMEngine, request_id: str, *args: Any, **settings: Any) -> Request:
    """Queue a request and return what the engine keeps of it."""
    engine.add_request(request_id, *args, **settings)
    return engine.requests[request_id]


def greedy(prompt: Sequence[int], max_tokens: int = 12, **settings: object) -> Ask:
    """A greedy request that runs to its limit."""
    params = SamplingParams.from_dict({"temperature": 0, "max_tokens": max_tokens, **settings})
    return Ask(prompt=tuple(prompt), params=params, eos_ids=())


def sampled(prompt: Sequence[int], max_tokens: int = 12, seed: int = 0, **settings: object) -> Ask:
    params = SamplingParams.from_dict({"temperature": 0.8, "max_tokens": max_tokens, **settings})
    return Ask(prompt=tuple(prompt), params=params, seed=seed, eos_ids=())


def rounds_of(
    ask: Ask, speculation: Speculation | None = None, max_length: int = MAX_LENGTH, kv_cache_dtype: str = "auto"
) -> list[Round]:
    """What the reference loop does with a request: worked out once, as many tests ask for the same."""
    return list(_rounds_of(ask, speculation if ask.speculate else None, max_length, kv_cache_dtype))


@functools.cache
@torch.inference_mode()
def _rounds_of(ask: Ask, speculation: Speculation | None, max_length: int, kv_cache_dtype: str) -> tuple[Round, ...]:
    models = [target(), *([speculation.drafter] if speculation else [])]
    assert not any("forward" in vars(model) for model in models), "what a broken model says would be kept"
    return tuple(
        reference.generate(
            target(),
            ask.prompt,
            ask.params,
            seed=ask.seed,
            speculation=speculation,
            max_length=max_length,
            eos_ids=ask.eos_ids,
            kv_cache_dtype=FP8 if kv_cache_dtype == "fp8" else None,
        )
    )


def answer_of(
    ask: Ask, speculation: Speculation | None = None, max_length: int = MAX_LENGTH, kv_cache_dtype: str = "auto"
) -> tuple[list[int], str]:
    """Its tokens, and why it ended."""
    rounds = rounds_of(ask, speculation, max_length, kv_cache_dtype)
    assert rounds[-1].finish_reason is not None
    return [token for done in rounds for token in done.tokens], rounds[-1].finish_reason


def make_engine(
    *,
    drafts: Drafter | None = None,
    depth: int | Callable[[int], int | Arm] = 3,
    max_depth: int | None = None,
    graphs: bool = False,
    tree: TreeShape | None = None,
    sample_drafts: bool | None = False,
    verify_blocks: bool = False,
    policy: DepthPolicy | None = None,
    **settings: object,
) -> LLMEngine:
    """Build an engine on the tiny target. `graphs`: rounds go through (a stand-in for) captured graphs."""
    values = {"max_model_len": MAX_LENGTH, "max_num_seqs": 4, "block_size": 4, "num_blocks": 200, **settings}
    deepest = max_depth if max_depth is not None else depth if isinstance(depth, int) else 4
    if drafts is not None:
        values["speculative_config"] = speculation(
            max(deepest, 1), tree=tree, sample_drafts=sample_drafts, verify_blocks=verify_blocks
        )
    if policy is None and (callable(depth) or depth == 0):
        policy = AnyDepth(depth if callable(depth) else lambda _: 0, is_tree=tree is not None)
    engine = LLMEngine(target(), drafts, EngineConfig(**values), policy)  # type: ignore[arg-type]
    if graphs:
        sizes = engine.config.cudagraph_capture_sizes or batch_sizes(engine.config.max_num_seqs)
        engine.runner.graphs = CpuGraphs(engine.runner.state, sizes)
    return engine


def speculation(
    depth: int, *, tree: TreeShape | None = None, sample_drafts: bool | None = False, verify_blocks: bool = False
) -> SpeculativeConfig:
    """For an engine that is given its drafter; `sample_drafts` None: its policy says."""
    return SpeculativeConfig(
        model="given",
        num_speculative_tokens=depth,
        adaptive=sample_drafts is None,
        tree_width=None if tree is None else tree.width,
        tree_budget=60 if tree is None else tree.budget,
        draft_sample_method={True: "probabilistic", False: "greedy", None: "auto"}[sample_drafts],
        rejection_sample_method="block" if verify_blocks else "standard",
    )


class AnyDepth:
    """A policy from a function of the number of requests; no deeper than some request wants.

    `is_tree`: what a depth means. `sampled`: whether a request's drafts are drawn at random, by its number.
    """

    choice = None

    def __init__(
        self,
        depth: Callable[[int], int | Arm],
        depths: Sequence[int] = (),
        *,
        is_tree: bool = False,
        sampled: Callable[[Request], bool] = lambda _: False,
    ) -> None:
        self._depth, self._is_tree, self._sampled = depth, is_tree, sampled
        self.arms = [Arm(depth, is_tree=is_tree and depth > 0) for depth in depths]

    def observe(self, request: Request, *, is_tree: bool, drafted: int, accepted: int) -> None:
        pass

    def observe_round(self, *, arm: Arm, seconds: float) -> None:
        pass

    def expect(self, acceptance: Acceptance) -> None:
        pass

    def samples_drafts(self, request: Request, others: Collection[Request], costs: RoundCosts) -> bool:
        return self._sampled(request)

    def choose(self, requests: Collection[Request], costs: CostTable) -> Arm:
        wanted, arm = wanted_depth(requests), self._depth(len(requests))
        if not isinstance(arm, Arm):
            arm = Arm(arm, is_tree=self._is_tree)
        depth = min(arm.depth, wanted)
        return Arm(depth, is_tree=arm.is_tree) if depth else PLAIN


class GivenCosts(AdaptiveDepth):
    """The controller, by costs that a test makes up: what it chooses does not depend on how busy the machine is."""

    def __init__(self, max_depth: int, max_num_seqs: int, *, tree: bool = False) -> None:
        super().__init__(max_depth, max_num_seqs, tree=tree)
        self.chosen: Counter[Arm] = Counter()  # where some request wanted drafts
        self._given = CostTable()

    def set_costs(self, seconds: Sequence[float]) -> None:
        """Of a round of each arm, in their order."""
        self._given = CostTable()
        arms = list(zip(self.arms, seconds, strict=False))
        for (arm, cost), batch, _ in itertools.product(arms, (1, 2, 5, 64), range(MIN_SAMPLES)):
            self._given.add(batch=batch, arm=arm, seconds=cost * batch**0.5)

    def choose(self, requests: Collection[Request], costs: CostTable) -> Arm:
        arm = super().choose(requests, self._given)
        self.chosen[arm] += wanted_depth(requests) > 0
        return arm

    def samples_drafts(self, request: Request, others: Collection[Request], costs: RoundCosts) -> bool:
        given = RoundCosts()  # not the engine's own, to which it adds what rounds take here
        given.tables = dict.fromkeys(costs.tables, self._given)
        return super().samples_drafts(request, others, given)

    def observe_round(self, *, arm: Arm, seconds: float) -> None:
        super().observe_round(arm=arm, seconds=self._given.estimate(1, arm) or 0.0)


class AnyBudget(AdmissionPolicy):
    """Admits a share of the drafts, whatever that is good for; None: all, in full rounds."""

    def __init__(self, max_depth: int, share: float | None) -> None:
        super().__init__(max_depth, Budgets(shares=(0.25, 0.5, 0.75)))
        self.share = share
        self.rounds: Counter[bool] = Counter()  # by whether some drafts only were admitted

    def admit(self, requests: Sequence[Request], depth: int, *_: object) -> int | None:
        is_ragged = self.share is not None
        self.rounds[is_ragged] += 1
        return int((self.share or 0) * len(requests) * depth) if is_ragged else None


def verify_share(engine: LLMEngine, share: float | None) -> AnyBudget:
    """Let an engine verify this share of the drafts of each round; return what decides it."""
    budget = engine.admission = AnyBudget(engine.config.max_depth, share)
    if engine.runner.graphs is not None:
        engine.runner.graphs.budgets = budget.budgets
    return budget


def run(engine: LLMEngine, limit: int = 2000) -> list[RequestUpdate]:
    """Step until nothing is left, checking integrity after each step; return all updates."""
    updates: list[RequestUpdate] = []
    while engine.has_unfinished:
        updates += engine.step()
        engine.check_integrity()
        limit -= 1
        assert limit > 0, "the engine does not come to an end"
    return updates


def answers(engine: LLMEngine, asks: Sequence[Ask]) -> list[list[int]]:
    """Run requests together and return their tokens."""
    first = engine.stats().finished + engine.stats().aborted
    requests = [ask.submit(engine, f"{first}-{i}") for i, ask in enumerate(asks)]
    run(engine)
    return [request.output for request in requests]


class CpuGraphs(GraphRunner):
    """Graphs as they behave on a GPU, without one: recorded once, played again on the tensors they were given then.

    Results are new ones each time: on a GPU the copy to the host is queued behind the replay, here nothing keeps them.
    """

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        run()
        return run


Drafts = tuple[tuple[int, ...], tuple[int, ...]]  # tokens, and the parents of a tree's nodes


@functools.cache
def _states_of(text: tuple[int, ...], aux_layer_ids: tuple[int, ...]) -> TargetStates:
    """The target's, after each token. Most drafters ask for those of the same texts."""
    positions = torch.arange(len(text))
    storage = reference.DenseCache(TARGET.num_layers, positions.device).extend(positions)
    states: TargetStates = target()(torch.tensor(text), positions, storage, aux_layer_ids)
    return states


@functools.cache
@torch.inference_mode()
def drafts_after(
    name: str, text: tuple[int, ...], depth: int, tree: TreeShape | None = None, sampled_by: Ask | None = None
) -> Drafts:
    """What a drafter drafts after a text that it has read from the start, by the reference loop's own functions.

    A round drafts from the text alone, whatever came to pass before: the oracle for every draft of every round.
    """
    sequence = reference._Sequence(
        target=target(),
        prompt=text,
        params=SamplingParams(temperature=0) if sampled_by is None else sampled_by.params,
        seed=0 if sampled_by is None else sampled_by.seed,
        max_length=None,
        eos_ids=(),
    )
    sampling = sampled_by is not None and not sampled_by.params.is_greedy
    speculation = Speculation(drafter=drafter(name), depth=depth, tree=tree, sample_drafts=sampling)
    tokens = torch.tensor(text)
    positions = torch.arange(len(text) - 1)
    features = speculation.drafter.fuse(_states_of(text[:-1], speculation.drafter.aux_layer_ids))
    settled = reference.SettledRows(tokens=tokens[1:], features=features, positions=positions)
    draft = reference._propose(
        speculation, reference.DenseCache(speculation.drafter.config.num_layers, tokens.device), settled, sequence
    )
    assert draft is not None
    parents = draft.parents.tolist() if isinstance(draft, reference.DraftTree) else ()
    return tuple(draft.tokens.tolist()), tuple(parents)


def run_checking_drafts(engine: LLMEngine, name: str, asks: Sequence[Ask]) -> list[Request]:
    """Run requests together on an engine that reads at once; what is drafted must be what the oracle drafts."""
    first = engine.stats().finished + engine.stats().aborted
    requests = [ask.submit(engine, f"{first}-{i}") for i, ask in enumerate(asks)]
    for _ in range(2000):
        if not engine.has_unfinished:
            return requests
        engine.step()
        engine.check_integrity()
        for ask, request in zip(asks, requests, strict=True):
            assert_drafts(engine, name, ask, request)
    raise AssertionError("the engine does not come to an end")


def wrong_drafts(engine: LLMEngine, name: str, ask: Ask, request: Request) -> bool:
    """Whether the drafts that a request's next round verifies are not those the oracle drafts after its text."""
    state, row = engine.runner.state, request.row
    depth, is_tree = engine.scheduler._last_draft
    if row is None or request.phase != "decode" or not state.draft_count[row]:
        return False
    count = int(state.draft_count[row])
    assert count <= depth
    assert state.length[row] == len(request.tokens) - 1
    if is_tree:
        tree = engine.runner.state.tree
        tokens, parents = drafts_after(name, tuple(request.tokens), depth, tree)
        found = (state.tree_tokens[row].tolist()[: len(tokens)], state.tree_parents[row].tolist()[: len(tokens)])
        return found != (list(tokens), list(parents))
    sampled_by = ask if request.sample_drafts else None
    tokens, _ = drafts_after(name, tuple(request.tokens), depth, None, sampled_by)
    return state.drafts[row, :count].tolist() != list(tokens[:count])


def assert_drafts(engine: LLMEngine, name: str, ask: Ask, request: Request) -> None:
    assert not wrong_drafts(engine, name, ask, request), f"wrong drafts for {request.id} after {request.tokens}"
