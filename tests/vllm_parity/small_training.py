"""Plain training loops for pairs so small that seconds are enough: an independent, readable TTT beside the product's.

Parity with vLLM needs drafters that are right some of the time, at every depth. Random weights never are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.layers.attention import AttentionSpec, Heads
from fledge.models.config import DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter, DraftVocabulary
from fledge.models.drafter.variants import build
from fledge.models.target.decoder import TargetModel, TargetStates


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much training a model gets."""

    steps: int
    batch: int = 10  # sequences in a step
    window: int = 48  # tokens of a sequence
    rate: float  # the highest learning rate
    seed: int = 0


Progress = Callable[[float], None]  # called after each step, with its loss


def synthetic_text(vocab_size: int, *, length: int, seed: int) -> Tensor:
    """Words of two to six tokens; each word has three likely successors, and one token in twenty-five is noise.

    The likeliest successors form one cycle through all words, so greedy text goes a long way before it repeats itself.
    """
    random = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=random)

    num_words = 64
    words = [draw(vocab_size, int(draw(5, 1)) + 2) for _ in range(num_words)]
    successors = draw(num_words, num_words, 3)
    cycle = torch.randperm(num_words, generator=random)
    successors[cycle, 0] = cycle.roll(-1)
    choices = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), length, replacement=True, generator=random)
    parts, word, total = [], 0, 0
    for choice in choices:
        parts.append(words[word])
        total += len(words[word])
        if total >= length:
            break
        word = int(successors[word, choice])
    text = torch.cat(parts)[:length]
    noisy = torch.rand(length, generator=random) < 0.04
    return torch.where(noisy, draw(vocab_size, length), text)


@dataclass
class BatchedStorage:
    """Keys and values of a batch of whole sequences; implements `KeyValueStorage`.

    The first pass is causal. Each further pass is one more draft step from every position at once: row t of pass s sits
    at position t + s, sees the first pass up to position t, and its own rows of the passes between.
    """

    keys: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer, one entry for each pass
    values: dict[int, list[Tensor]] = field(default_factory=dict)

    def attend(self, heads: Heads, spec: AttentionSpec) -> Tensor:
        query, key, value = heads.finished()
        groups = query.shape[-2] // key.shape[-2]
        keys = self.keys.setdefault(spec.layer, [])
        values = self.values.setdefault(spec.layer, [])
        keys.append(key.repeat_interleave(groups, dim=-2))  # each [batch, length, heads, head_dim]
        values.append(value.repeat_interleave(groups, dim=-2))
        length = query.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        if (
            spec.sliding_window is not None and not spec.chunked
        ):  # of positions: this pass is one further on for each before it
            causal &= ~torch.ones(length, length, dtype=torch.bool).tril(len(keys) - 1 - spec.sliding_window)
        if spec.chunked and spec.sliding_window is not None:  # of targets, which make one pass
            chunks = torch.arange(length) // spec.sliding_window
            causal &= chunks[:, None] == chunks
        first = torch.einsum("bthd,bshd->bths", query, keys[0]).masked_fill(~causal[:, None], -torch.inf)
        own = [torch.einsum("bthd,bthd->bth", query, later)[..., None] for later in keys[1:]]
        scores = torch.cat([first, *own], dim=-1) * spec.scale  # [batch, length, heads, length + steps]
        if heads.sinks is not None:  # one more, of which nothing comes
            scores = torch.cat([scores, heads.sinks[:, None].expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(-1)
        mixed = torch.einsum("bths,bshd->bthd", weights[..., :length], values[0])
        for step, later in enumerate(values[1:]):
            mixed = mixed + weights[..., length + step, None] * later
        return mixed


def train_target(
    config: TargetConfig,
    text: Tensor,
    budget: Budget,
    progress: Progress = lambda _loss: None,
    *,
    starts: Tensor | None = None,
) -> TargetModel:
    """Next-token training on windows of `text` from random places, or from some of `starts`."""
    torch.manual_seed(budget.seed)
    target = TargetModel(config)
    optimisation = _Optimisation(list(target.parameters()), budget)
    for windows in _windows(text, budget, starts, extra=1):  # [batch, window + 1]
        final = _states(target, windows[:, :-1], ()).final
        loss = F.cross_entropy(target.logits(final).flatten(0, 1), windows[:, 1:].flatten())
        optimisation.step(loss)
        progress(loss.item())
    return target.eval()


def train_drafter(
    config: DrafterConfig,
    target: TargetModel,
    text: Tensor,
    budget: Budget,
    progress: Progress = lambda _loss: None,
    *,
    unroll: int,
    starts: Tensor | None = None,
    head_from_target: bool = False,
) -> Drafter:
    """Training-time test: `unroll` draft steps from every position, real tokens, features of the drafter's own.

    What the drafter learns to predict is the target's choice, not the text. A reduced vocabulary takes the tokens that
    the text uses most; positions at which the target wants another one do not count.
    """
    torch.manual_seed(budget.seed)
    drafter = build(config)
    if config.reduced_vocab:
        frequent = text.bincount(minlength=config.vocab_size).argsort(descending=True)[: config.draft_vocab_size]
        drafter.vocabulary = DraftVocabulary.from_target_ids(frequent.sort().values, config.vocab_size)
    if config.own_embedding:  # a start from the target's, which training then leaves behind
        assert drafter.embed_tokens is not None
        drafter.embed_tokens.load_state_dict(target.embed_tokens.state_dict())
    if head_from_target:  # likewise, where steps are too few to learn a head from nothing
        assert drafter.lm_head is not None
        drafter.lm_head.load_state_dict(target.lm_head.state_dict())
    own = list(drafter.parameters())
    target.requires_grad_(False)
    drafter.share_with(target)
    optimisation = _Optimisation(own, budget)
    for tokens in _windows(text, budget, starts):  # [batch, window]
        with torch.no_grad():
            states = _states(target, tokens, drafter.aux_layer_ids)
            choices = target.logits(states.final).argmax(-1)  # [batch, window]: after each token
        loss = _unrolled_loss(drafter, tokens, states, choices, unroll)
        optimisation.step(loss)
        progress(loss.item())
    return drafter.eval()


def _unrolled_loss(drafter: Drafter, tokens: Tensor, states: TargetStates, choices: Tensor, unroll: int) -> Tensor:
    """Row t of step s reads x_{t+s+1} and predicts the target's choice after it: both shift by one each step.

    tokens  [x0 x1 x2 x3 x4]     step 0, rows 0..: features h0 h1 h2   read x1 x2 x3   predict choices[1] [2] [3]
                                 step 1, rows 0..: its own outputs     read x2 x3 x4   predict choices[2] [3] [4]
    """
    rows = tokens.shape[1] - unroll
    features, storage = drafter.fuse(states)[:, :rows], BatchedStorage()
    positions = torch.arange(rows).expand(len(tokens), rows)
    losses = []
    for step in range(unroll):
        out = drafter(tokens[:, step + 1 : step + 1 + rows], features, positions + step, storage)
        features = out.feature
        logits = drafter.full_vocab_logits(out.head).flatten(0, 1)
        wanted = choices[:, step + 1 : step + 1 + rows].flatten()
        if drafter.vocabulary is not None:
            wanted = wanted.masked_fill(~drafter.vocabulary.in_draft[wanted], -100)
        losses.append(F.cross_entropy(logits, wanted))
    return torch.stack(losses).mean()


def _states(target: TargetModel, tokens: Tensor, aux_layer_ids: tuple[int, ...]) -> TargetStates:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    states: TargetStates = target(tokens, positions, BatchedStorage(), aux_layer_ids)
    return states


def _windows(text: Tensor, budget: Budget, starts: Tensor | None, *, extra: int = 0) -> Iterator[Tensor]:
    """A batch for each step: pieces of `text`."""
    random = torch.Generator().manual_seed(budget.seed)
    length = budget.window + extra
    starts = torch.arange(len(text)) if starts is None else starts
    starts = starts[starts < len(text) - length]
    for _ in range(budget.steps):
        chosen = starts[torch.randint(len(starts), (budget.batch, 1), generator=random)]
        yield text[chosen + torch.arange(length)]


class _Optimisation:
    """AdamW with a rate that rises, then falls to nothing."""

    def __init__(self, parameters: list[torch.nn.Parameter], budget: Budget) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=budget.rate, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, budget.rate, total_steps=budget.steps)

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
