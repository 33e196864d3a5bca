"""A toy target and toy drafters, small enough that the distribution of what they emit can be written down.

They are tables of logits for the next token given the last one. Penalties make the target depend on everything before.
The distribution over the first LENGTH tokens is worked out by plain numpy (`exact_joint`), and a chi-square test
(`p_value`) compares it with what many seeded sequences emitted.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fledge.decoding.acceptance import Accepted, accept_matching
from fledge.decoding.params import SamplingParams
from fledge.decoding.random import Stream, uniform
from fledge.decoding.sampling import SamplingRows, TokenHistory, distribution
from fledge.kernels.sample import choose

VOCAB, DEPTH, LENGTH = 6, 3, 3
PROMPT = [2, 0]  # the last token is the first context
SIGNIFICANCE = 1e-4

PLAIN = SamplingParams()
SHAPED = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)
GREEDY = SamplingParams(temperature=0.0, presence_penalty=0.4)

TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7))
DRAFTERS = {
    "always": TARGET,  # agrees with the plain target everywhere
    "sometimes": TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8)),
    "seldom": -3.0 * TARGET,
}


@dataclass
class State:
    """Many independent sequences of the same request under different seeds."""

    params: SamplingParams
    seeds: Tensor  # [batch]
    tokens: Tensor  # [batch, LENGTH + DEPTH + 1] emitted so far, then -1
    emitted: Tensor  # [batch]

    @classmethod
    def start(cls, params: SamplingParams, sequences: int, first_seed: int = 0) -> "State":
        seeds = torch.arange(first_seed, first_seed + sequences)
        tokens = torch.full((sequences, LENGTH + DEPTH + 1), -1)
        return cls(params, seeds, tokens, torch.zeros(sequences, dtype=torch.int64))

    @property
    def last(self) -> Tensor:
        before = self.tokens.gather(1, (self.emitted - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where(self.emitted > 0, before, PROMPT[-1])

    @property
    def history(self) -> TokenHistory:
        batch = self.seeds.shape[0]
        start = TokenHistory.from_tokens([PROMPT], [[]], vocab_size=VOCAB)
        counts = start.output_counts.repeat(batch, 1)
        counts.scatter_add_(1, self.tokens.clamp(min=0), (self.tokens >= 0).to(torch.int32))
        return TokenHistory(prompt_mask=start.prompt_mask.repeat(batch, 1), output_counts=counts)

    @property
    def positions(self) -> Tensor:
        """Positions of the next DEPTH + 1 tokens, [batch, DEPTH + 1]."""
        return len(PROMPT) + self.emitted[:, None] + torch.arange(DEPTH + 1)

    def rows(self, count: int) -> SamplingRows:
        return SamplingRows.from_params([self.params], [0], vocab_size=VOCAB).repeat(count)

    def emit(self, accepted: Accepted) -> Counter[int]:
        """Append a round's tokens where a sequence is not done; return how often each number was accepted."""
        busy = self.emitted < LENGTH
        width = accepted.tokens.shape[1]
        slots = self.emitted[:, None] + torch.arange(width)
        keep = busy[:, None] & (accepted.tokens >= 0)
        slots = slots.clamp(max=self.tokens.shape[1] - 1)
        current = self.tokens.gather(1, slots)
        self.tokens = self.tokens.scatter(1, slots, torch.where(keep, accepted.tokens, current))
        self.emitted = self.emitted + keep.sum(1)
        return Counter(accepted.accepted[busy].tolist())


def verify(state: State, drafts: Tensor) -> Tensor:
    """The target's distributions at the DEPTH + 1 verify rows, [batch, depth + 1, vocab]."""
    batch, depth = drafts.shape
    contexts = torch.cat([state.last[:, None], drafts], dim=1)  # [batch, depth + 1]
    probs = distribution(
        TARGET[contexts.flatten()], state.rows(contexts.numel()), history=state.history.after_chain(drafts)
    )
    return probs.view(batch, depth + 1, VOCAB)


def matching_round(state: State, drafter: Tensor, depth: int) -> Accepted:
    """Argmax drafts, checked against the target's own seeded choices."""
    drafts, last = [], state.last
    for _ in range(depth):
        last = drafter[last].argmax(-1)
        drafts.append(last)
    chain = torch.stack(drafts, dim=1) if drafts else torch.empty(len(state.seeds), 0, dtype=torch.int64)
    probs = verify(state, chain)
    uniforms = uniform(state.seeds[:, None], state.positions[:, : depth + 1], Stream.CHOICE)
    return accept_matching(chain, choose(probs.flatten(0, 1), uniforms.flatten()).view(-1, depth + 1))


def run(state: State, one_round) -> Counter[int]:
    """Run rounds until every sequence has LENGTH tokens; return the tally of accepted drafts per round."""
    tally: Counter[int] = Counter()
    while (state.emitted < LENGTH).any():
        tally += state.emit(one_round(state))
    return tally


def exact_next(params: SamplingParams, emitted: tuple[int, ...]) -> np.ndarray:
    """The target's next-token distribution, written out in numpy independently of `sampling.py`."""
    x = TARGET[(*PROMPT, *emitted)[-1]].double().numpy().copy()
    for token in {*PROMPT, *emitted}:
        x[token] *= 1 / params.repetition_penalty if x[token] > 0 else params.repetition_penalty
    for token, count in Counter(emitted).items():
        x[token] -= params.presence_penalty + params.frequency_penalty * count
    if params.is_greedy:
        return np.eye(VOCAB)[x.argmax()]
    probs = np.exp(x / params.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)
    beyond = np.cumsum(probs[order]) - probs[order] >= params.top_p
    probs[order[beyond]] = 0.0
    return probs / probs.sum()


def exact_joint(params: SamplingParams) -> np.ndarray:
    """The probability of every sequence of LENGTH tokens, [VOCAB ** LENGTH]."""
    joint = []
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        joint.append(np.prod([exact_next(params, tokens[:i])[tokens[i]] for i in range(LENGTH)]))
    return np.array(joint)


def p_value(state: State) -> float:
    """Chi-square of the emitted sequences against `exact_joint`; 0 when something impossible was emitted.

    The joint distribution is right if and only if every token is right given its prefix.
    """
    cells = (state.tokens[:, :LENGTH] * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    observed = np.bincount(cells.numpy(), minlength=VOCAB**LENGTH)
    expected = exact_joint(state.params) * len(state.seeds)
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5  # too few for the chi-square approximation: pooled into one cell
    groups_observed = np.append(observed[~rare], observed[rare].sum())
    groups_expected = np.append(expected[~rare], expected[rare].sum())
    possible = groups_expected > 0
    if possible.sum() == 1:
        return 1.0
    return float(stats.chisquare(groups_observed[possible], groups_expected[possible]).pvalue)
