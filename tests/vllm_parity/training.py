"""Plain training loops for pairs so small that seconds are enough. No part of the product: only the models are.

The parity tests need drafters that are right some of the time, at every depth. Random weights never are.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.layers.attention import AttentionSpec, ProjectedHeads
from fledge.models.config import DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import build
from fledge.models.drafter.vocab import DraftVocabulary
from fledge.models.target.decoder import TargetModel, TargetStates

WINDOW = 48  # tokens of a training sequence
BATCH = 10


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

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        query, key, value = heads.finished()
        groups = query.shape[-2] // key.shape[-2]
        keys = self.keys.setdefault(spec.layer, [])
        values = self.values.setdefault(spec.layer, [])
        keys.append(key.repeat_interleave(groups, dim=-2))  # each [batch, length, heads, head_dim]
        values.append(value.repeat_interleave(groups, dim=-2))
        length = query.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        first = torch.einsum("bthd,bshd->bths", query, keys[0]).masked_fill(~causal[:, None], -torch.inf)
        own = [torch.einsum("bthd,bthd->bth", query, later)[..., None] for later in keys[1:]]
        weights = (torch.cat([first, *own], dim=-1) * spec.scale).softmax(-1)  # [batch, length, heads, length + steps]
        mixed = torch.einsum("bths,bshd->bthd", weights[..., :length], values[0])
        for step, later in enumerate(values[1:]):
            mixed = mixed + weights[..., length + step, None] * later
        return mixed


def train_target(config: TargetConfig, text: Tensor, *, steps: int, seed: int) -> TargetModel:
    """Next-token training on random windows of `text`."""
    torch.manual_seed(seed)
    target = TargetModel(config)
    random = torch.Generator().manual_seed(seed)
    optimizer, schedule = _optimizer(list(target.parameters()), 4e-3, steps)
    for _ in range(steps):
        tokens = _windows(text, WINDOW + 1, random)  # [batch, window + 1]
        final = _states(target, tokens[:, :-1], ()).final
        loss = F.cross_entropy(target.logits(final).flatten(0, 1), tokens[:, 1:].flatten())
        _step(loss, optimizer, schedule)
    return target.eval()


def train_drafter(
    config: DrafterConfig, target: TargetModel, text: Tensor, *, steps: int, unroll: int, seed: int
) -> Drafter:
    """Training-time test: `unroll` draft steps from every position, real tokens, features of the drafter's own.

    What the drafter learns to predict is the target's choice, not the text. A reduced vocabulary takes the tokens that
    the text uses most; positions at which the target wants another one do not count.
    """
    torch.manual_seed(seed)
    drafter = build(config)
    if config.reduced_vocab:
        frequent = text.bincount(minlength=config.vocab_size).argsort(descending=True)[: config.draft_vocab_size]
        drafter.vocabulary = DraftVocabulary.from_target_ids(frequent.sort().values, config.vocab_size)
    if config.own_embedding:  # a start from the target's, which training then leaves behind
        assert drafter.embed_tokens is not None
        drafter.embed_tokens.load_state_dict(target.embed_tokens.state_dict())
    own = list(drafter.parameters())
    target.requires_grad_(False)
    drafter.share_with(target)
    random = torch.Generator().manual_seed(seed)
    optimizer, schedule = _optimizer(own, 3e-3, steps)
    for _ in range(steps):
        tokens = _windows(text, WINDOW, random)
        with torch.no_grad():
            states = _states(target, tokens, drafter.aux_layer_ids)
            choices = target.logits(states.final).argmax(-1)  # [batch, window]: after each token
        _step(_unrolled_loss(drafter, tokens, states, choices, unroll), optimizer, schedule)
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


def _windows(text: Tensor, length: int, random: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - length, (BATCH, 1), generator=random)
    return text[starts + torch.arange(length)]


def _optimizer(
    parameters: list[torch.nn.Parameter], rate: float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)


def _step(loss: Tensor, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
