"""The reference loop: one sequence, dense caches, no optimisations. Faster engines are tested against it.

A round feeds the target the new tokens (the prompt at first, then one token) and the drafts, decides with `acceptance`
how many drafts to accept, drops the others from the cache, and drafts again:

    fed        x4   d5  d6  d7        d5 and d6 are the target's choices, d7 is not:
    choices    x5   x6  x7  x8        x5 x6 x7 are emitted; x8 follows a rejected draft and is dropped

Without a drafter the same loop is plain decoding. Rounds count drafts as verified, even if a stop condition then trims
the tokens: statistics describe the drafter, and agree with vLLM's.
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
    """How to draft: a chain of `depth` tokens, or a tree of `depth` levels."""

    drafter: Drafter
    depth: int
    tree: TreeShape | None = None
    sample_drafts: bool = False  # chains of sampled requests: sample drafts, accept by rejection sampling
    verify_blocks: bool = False  # with `sample_drafts`: block verification


@dataclass(frozen=True, kw_only=True)
class Round:
    """Result of one round. The first `accepted` of `tokens`, if not trimmed, were drafted."""

    tokens: tuple[int, ...]  # trimmed at the stop condition
    drafted: int  # depth of the draft; 0 in the first round and when there is no room to draft
    accepted: int  # accepted drafts, before trimming
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
    """Yield rounds until the sequence ends: at an eos or stop id, at `max_tokens`, or at `max_length` tokens in total.

    `seed` is used if `params.seed` is None. Stop strings are not checked: there is no text here. `kv_cache_dtype`: see
    `DenseCache`, for both models.
    """
    sequence = _Sequence(target=target, prompt=prompt, params=params, seed=seed, max_length=max_length, eos_ids=eos_ids)
    drafter_cache = None
    if speculation is not None:
        drafter_cache = DenseCache(speculation.drafter.config.num_layers, sequence.device, dtype=kv_cache_dtype)
    aux_layer_ids = speculation.drafter.aux_layer_ids if speculation else ()
    cache = DenseCache(target.config.num_layers, sequence.device, dtype=kv_cache_dtype)
    pending = sequence.tensor(prompt)  # known tokens that are not in the target's cache yet
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
        # Keep the cache rows of the pending tokens and of the accepted drafts.
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
    """Return the positions of a pass's rows, and for a tree its attention mask."""
    chain = torch.arange(start, start + pending + (len(draft.tokens) if draft is not None else 0))
    if not isinstance(draft, DraftTree):
        return chain, None
    assert pending == 1, "a tree grows from one token"
    return torch.cat([chain[:1], start + draft.depths.cpu()]), visibility(draft.parents)


def _propose(speculation: Speculation, cache: DenseCache, settled: SettledRows, sequence: "_Sequence") -> Draft | None:
    """Draft as deep as both models have positions left; None if there is no room."""
    room = min(sequence.max_length, speculation.drafter.config.max_positions) - len(sequence.tokens) - 1
    depth = min(speculation.depth, room)
    if depth < 1:
        return None  # the room only shrinks, so the rows that the drafter misses now are never needed
    if speculation.tree is not None:
        return draft_tree(speculation.drafter, cache, settled, depth, speculation.tree)
    at_random = speculation.sample_drafts and not sequence.params.is_greedy
    return draft_chain(speculation.drafter, cache, settled, depth, sequence.sampling if at_random else None)


class _Sequence:
    """The tokens of a request so far, with sampling settings and stop conditions."""

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
        """Return the tokens to emit and the verify rows of the accepted drafts (row 0 precedes all drafts).

        `logits` [1 + drafts, vocab]: the target's, for each verify row.
        """
        depths = self._depths(draft)  # [rows]
        rows = self.sampling.repeat(len(depths))
        history, forbidden = self._history(draft), self._forbidden(depths)
        positions = len(self.tokens) + depths
        if isinstance(draft, DraftChain) and draft.probs is not None:
            accept = accept_block if verify_blocks else accept_rejection
            result = accept(
                draft.tokens[None],
                draft.probs[None],
                distribution(logits, rows, history=history, forbidden=forbidden)[None],
                uniform(rows.seed, in_round(positions, depths), Stream.ACCEPT)[None, :-1],
                uniform(rows.seed, positions, Stream.RESIDUAL)[None],
            )
            return _emitted(result.tokens[0], torch.arange(1, len(depths), device=self.device))
        choices = choose_at(logits, rows, positions, history=history, forbidden=forbidden)
        if isinstance(draft, DraftTree):
            path = accept_tree(draft, choices)
            return _emitted(path.tokens, path.nodes + 1)
        drafts = self.tensor([]) if draft is None else draft.tokens
        result = accept_matching(drafts[None], choices[None])
        return _emitted(result.tokens[0], torch.arange(1, len(depths), device=self.device))

    def append(self, emitted: list[int], draft: Draft | None) -> Round:
        """Append the emitted tokens up to the first that ends the sequence."""
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

    def _depths(self, draft: Draft | None) -> Tensor:
        """Return the number of drafts before each verify row. [rows]"""
        root = torch.zeros(1, dtype=torch.int64, device=self.device)
        if draft is None:
            return root
        if isinstance(draft, DraftTree):
            return torch.cat([root, draft.depths])
        return torch.arange(len(draft.tokens) + 1, device=self.device)

    def _history(self, draft: Draft | None) -> TokenHistory | None:
        """Return each verify row's tokens so far, for penalties: the sequence and the drafts before the row."""
        if not self.sampling.any_penalty:
            return None
        history = TokenHistory.from_tokens(
            [self.prompt], [self.tokens[len(self.prompt) :]], vocab_size=self.vocab_size, device=self.device
        )
        if isinstance(draft, DraftTree):
            return history.after_tree(draft.tokens[None], visibility(draft.parents)[None])
        return history if draft is None else history.after_chain(draft.tokens[None])

    def _forbidden(self, depths: Tensor) -> Tensor | None:
        """Return a mask of stop ids for rows before `min_tokens`; None if nothing is forbidden. bool [rows, vocab]"""
        produced = len(self.tokens) - len(self.prompt)
        if produced >= self.params.min_tokens or not self.stop_ids:
            return None
        is_stop = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        is_stop[self.tensor([token for token in self.stop_ids if token < self.vocab_size])] = True
        return ((produced + depths) < self.params.min_tokens)[:, None] & is_stop


def _emitted(tokens: Tensor, draft_rows: Tensor) -> tuple[list[int], Tensor]:
    """Return the tokens without PADDING, and the verify rows of the accepted drafts."""
    emitted = [token for token in tokens.tolist() if token >= 0]
    return emitted, draft_rows[: len(emitted) - 1]
