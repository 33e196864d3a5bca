"""The reference loop: one sequence, dense caches, no tricks. Every faster engine is tested against it.

A round feeds the target what is new (the prompt at first, then one token) together with the drafts, decides with
`acceptance` how many of them stand, forgets the rest, and lets the drafter propose again:

    fed        x4   d5  d6  d7        d5 and d6 are what the target chose, d7 is not:
    choices    x5   x6  x7  x8        x5 x6 x7 are emitted, x8 came after a wrong token and is dropped

Without a drafter the same loop is plain decoding. Statistics count what verification found, even where a stop
condition then trims the tokens, so that they describe the drafter (and agree with vLLM's).
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fledge.decoding.acceptance import accept_block, accept_matching, accept_rejection, accept_tree
from fledge.decoding.drafting import DraftChain, SettledRows, TreeShape, draft_chain, draft_tree
from fledge.decoding.params import SamplingParams
from fledge.decoding.random import Stream, in_round, uniform
from fledge.decoding.sampling import SamplingRows, TokenHistory, choose_at, distribution
from fledge.decoding.tree import DraftTree, visibility
from fledge.layers.dense_cache import DenseCache
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel

FinishReason = Literal["stop", "length"]
Draft = DraftChain | DraftTree


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How a drafter is used: a chain of `depth` tokens, or a tree of `depth` levels."""

    drafter: Drafter
    depth: int
    tree: TreeShape | None = None
    sample_drafts: bool = False  # chains: draft at random and accept by rejection (for sampled requests)
    verify_blocks: bool = False  # then: judge all drafts of a round together


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round added. The first `accepted` of `tokens` (as far as they go) had been drafted."""

    tokens: tuple[int, ...]  # trimmed at the stop condition
    drafted: int  # depth of the draft; 0 in the first round and when there is no room to draft
    accepted: int  # drafts that stood, before trimming
    finish_reason: FinishReason | None = None


@torch.no_grad()
def generate(
    target: TargetModel,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    speculation: Speculation | None = None,
    max_length: int | None = None,
    eos_ids: Sequence[int] = (),
    kv_cache_dtype: torch.dtype | None = None,
) -> Generator[Round, None, None]:
    """Yield rounds until the sequence ends: at an eos or stop id, at `max_tokens`, or at `max_length` tokens in all.

    `seed` stands in for `params.seed` where that is None. Stop strings are the caller's business: it sees text.
    `kv_cache_dtype`: as `DenseCache` has it, for both models.
    """
    sequence = _Sequence(target=target, prompt=prompt, params=params, seed=seed, max_length=max_length, eos_ids=eos_ids)
    drafter_cache = None
    if speculation is not None:
        drafter_cache = DenseCache(speculation.drafter.config.num_layers, sequence.device, dtype=kv_cache_dtype)
    aux_layer_ids = speculation.drafter.aux_layer_ids if speculation else ()
    cache = DenseCache(target.config.num_layers, sequence.device, dtype=kv_cache_dtype)
    pending = sequence.tensor(prompt)  # tokens that the target has not seen yet
    draft: Draft | None = None
    while True:
        start = cache.length
        fed = pending if draft is None else torch.cat([pending, draft.tokens])
        positions, visible = _layout(start, len(pending), draft)
        states = target(fed, positions.to(fed.device), cache.extend(positions.to(fed.device), visible), aux_layer_ids)
        verify_blocks = speculation is not None and speculation.verify_blocks
        emitted, kept = sequence.decide(target.logits(states.final[len(pending) - 1 :]), draft, verify_blocks)
        done = sequence.append(emitted, draft)
        yield done
        if done.finish_reason is not None:
            return
        # Keep the rows of what was pending and of the drafts that stood.
        rows = torch.cat([torch.arange(len(pending), device=fed.device), len(pending) - 1 + kept])
        cache.keep(start, rows)
        if speculation is not None and drafter_cache is not None:
            settled = SettledRows(
                tokens=torch.cat([pending[1:], sequence.tensor(emitted)]),
                features=speculation.drafter.fuse(states)[rows],
                positions=torch.arange(start, cache.length, device=fed.device),
            )
            draft = _propose(speculation, drafter_cache, settled, sequence)
        pending = sequence.tensor(emitted[-1:])


def _layout(start: int, pending: int, draft: Draft | None) -> tuple[Tensor, Tensor | None]:
    """Return the positions of the rows of a pass, and which of them see which where they are not a chain."""
    chain = torch.arange(start, start + pending + (len(draft.tokens) if draft is not None else 0))
    if not isinstance(draft, DraftTree):
        return chain, None
    assert pending == 1, "a tree grows from one token"
    return torch.cat([chain[:1], start + draft.depths.cpu()]), visibility(draft.parents)


def _propose(speculation: Speculation, cache: DenseCache, settled: SettledRows, sequence: "_Sequence") -> Draft | None:
    """Draft as deep as the target and the drafter have positions for, or not at all."""
    room = min(sequence.max_length, speculation.drafter.config.max_positions) - len(sequence.tokens) - 1
    depth = min(speculation.depth, room)
    if depth < 1:
        return None  # for good: the room only shrinks, so the rows the drafter misses are never needed
    if speculation.tree is not None:
        return draft_tree(speculation.drafter, cache, settled, depth, speculation.tree)
    at_random = speculation.sample_drafts and not sequence.params.is_greedy
    return draft_chain(speculation.drafter, cache, settled, depth, sequence.sampling if at_random else None)


class _Sequence:
    """The tokens of a request so far, and everything that depends on them: penalties, seeds, stopping."""

    def __init__(
        self,
        *,
        target: TargetModel,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        max_length: int | None,
        eos_ids: Sequence[int],
    ) -> None:
        self.device = target.embed_tokens.weight.device
        self.vocab_size = target.config.vocab_size
        self.params = params
        self.prompt = list(prompt)
        self.tokens = list(prompt)
        self.max_length = min(max_length or target.config.max_positions, target.config.max_positions)
        assert 0 < len(prompt) < self.max_length, "the caller checks the prompt"
        self.stop_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else frozenset(eos_ids)
        )
        self.sampling = SamplingRows.from_params(
            [params], [seed if params.seed is None else params.seed], vocab_size=self.vocab_size, device=self.device
        )

    def tensor(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self.device)

    def decide(self, logits: Tensor, draft: Draft | None, verify_blocks: bool = False) -> tuple[list[int], Tensor]:
        """Return the tokens to emit and the verify rows of the drafts that stood (row 0 is before any draft).

        logits [1 + drafts, vocab]: the target's after each verify row.
        """
        depths = self._depths(draft)  # [rows]
        rows = self.sampling.repeat(len(depths))
        history, forbidden = self._history(draft), self._forbidden(depths)
        positions = len(self.tokens) + depths
        if isinstance(draft, DraftChain) and draft.probs is not None:
            accept = accept_block if verify_blocks else accept_rejection
            verdict = accept(
                draft.tokens[None],
                draft.probs[None],
                distribution(logits, rows, history=history, forbidden=forbidden)[None],
                uniform(rows.seed, in_round(positions, depths), Stream.ACCEPT)[None, :-1],
                uniform(rows.seed, positions, Stream.RESIDUAL)[None],
            )
            return self._verdict(verdict.tokens[0], torch.arange(1, len(depths), device=self.device))
        choices = choose_at(logits, rows, positions, history=history, forbidden=forbidden)
        if isinstance(draft, DraftTree):
            path = accept_tree(draft, choices)
            return self._verdict(path.tokens, path.nodes + 1)
        drafts = self.tensor([]) if draft is None else draft.tokens
        verdict = accept_matching(drafts[None], choices[None])
        return self._verdict(verdict.tokens[0], torch.arange(1, len(depths), device=self.device))

    def append(self, emitted: list[int], draft: Draft | None) -> Round:
        """Take over the emitted tokens up to the first that ends the sequence."""
        kept: list[int] = []
        reason: FinishReason | None = None
        most = self.params.max_tokens
        longest = self.max_length if most is None else min(self.max_length, len(self.prompt) + most)
        for token in emitted:
            kept.append(token)
            self.tokens.append(token)
            if token in self.stop_ids or len(self.tokens) >= longest:
                reason = "stop" if token in self.stop_ids else "length"
                break
        drafted = 0
        if draft is not None:
            drafted = draft.max_depth if isinstance(draft, DraftTree) else len(draft.tokens)
        return Round(tokens=tuple(kept), drafted=drafted, accepted=len(emitted) - 1, finish_reason=reason)

    def _verdict(self, tokens: Tensor, draft_rows: Tensor) -> tuple[list[int], Tensor]:
        emitted = [token for token in tokens.tolist() if token >= 0]
        return emitted, draft_rows[: len(emitted) - 1]

    def _depths(self, draft: Draft | None) -> Tensor:
        """How many drafts stand between the text so far and each verify row. [rows]"""
        root = torch.zeros(1, dtype=torch.int64, device=self.device)
        if draft is None:
            return root
        if isinstance(draft, DraftTree):
            return torch.cat([root, draft.depths])
        return torch.arange(len(draft.tokens) + 1, device=self.device)

    def _history(self, draft: Draft | None) -> TokenHistory | None:
        """What each verify row has seen, for penalties: the text so far and the drafts on the way to it."""
        if not self.sampling.any_penalty:
            return None
        history = TokenHistory.from_tokens(
            [self.prompt], [self.tokens[len(self.prompt) :]], vocab_size=self.vocab_size, device=self.device
        )
        if isinstance(draft, DraftTree):
            return history.after_tree(draft.tokens[None], visibility(draft.parents)[None])
        return history if draft is None else history.after_chain(draft.tokens[None])

    def _forbidden(self, depths: Tensor) -> Tensor | None:
        """Stop ids may not come before `min_tokens` tokens are out. bool [rows, vocab]"""
        produced = len(self.tokens) - len(self.prompt)
        if produced >= self.params.min_tokens or not self.stop_ids:
            return None
        is_stop = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        is_stop[self.tensor([token for token in self.stop_ids if token < self.vocab_size])] = True
        return ((produced + depths) < self.params.min_tokens)[:, None] & is_stop
