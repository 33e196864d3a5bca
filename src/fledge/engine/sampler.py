"""Which tokens the target chooses in a round.

`Sampler` needs nothing from the host and is what fast rounds use. `HostSampler` adds what only the host knows:
penalties, biases, stop ids held back, grammars, log-probabilities. Both end in `decoding.sampling`, as the reference
loop does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from fledge.decoding.random import Stream, uniform
from fledge.decoding.sampling import SamplingRows, TokenHistory, adjust_logits, choose, distribution, greedy
from fledge.decoding.tree import DraftTree, visibility
from fledge.engine.constraint import Masks, masks_of
from fledge.engine.outputs import TokenLogprobs
from fledge.engine.request import Request
from fledge.engine.row_state import RowState
from fledge.kernels.argmax import argmax_rows
from fledge.kernels.sample import sample_rows


@dataclass(frozen=True, kw_only=True)
class LogprobsTensors:
    """Log-probabilities on the device: of the chosen tokens and of the likeliest ones."""

    chosen: Tensor  # [rows]
    top_values: Tensor  # [rows, n]
    top_tokens: Tensor  # [rows, n]

    def of(self, request: Request, first_row: int, tokens: list[int]) -> list[TokenLogprobs]:
        """Read those of one request, whose tokens begin at `first_row`. Waits for the device."""
        top = request.params.logprobs
        if top is None:
            return []
        rows = slice(first_row, first_row + len(tokens))
        chosen, values = self.chosen[rows].tolist(), self.top_values[rows, :top].tolist()
        likeliest = self.top_tokens[rows, :top].tolist()
        return [
            TokenLogprobs(token=token, logprob=chosen[i], top=tuple(zip(likeliest[i], values[i], strict=True)))
            for i, token in enumerate(tokens)
        ]


class SamplingMode(StrEnum):
    """What a round needs to sample on the device."""

    GREEDY = "greedy"  # every request is greedy
    SAMPLED = "sampled"  # temperature only
    FILTERED = "filtered"  # top-k, top-p or min-p somewhere in the batch

    @classmethod
    def needed_by(cls, requests: Sequence[Request]) -> "SamplingMode":
        sampled = [request.params for request in requests if not request.params.is_greedy]
        if not sampled:
            return cls.GREEDY
        filtered = any(p.top_k or p.top_p < 1.0 or p.min_p > 0.0 for p in sampled)
        return cls.FILTERED if filtered else cls.SAMPLED


class Sampler:
    """Decides the target's tokens for `rows` by their settings in the row state. Can be captured in a graph.

    Logits are [batch * width, vocab]; positions [batch, width] of what they decide.
    """

    wants_logprobs = False  # whether `record_logprobs` does anything
    logprobs: LogprobsTensors | None = None  # what it recorded

    def __init__(self, state: RowState, rows: Tensor, mode: SamplingMode) -> None:
        self.is_greedy = mode is SamplingMode.GREEDY  # the choice is the argmax of the logits and nothing else
        self._state = state
        self._rows = rows
        self._mode = mode

    def choices(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the target's own choice, [batch * width]."""
        if self.is_greedy:
            return argmax_rows(logits)
        repeated = self._rows.repeat_interleave(positions.shape[1])
        uniforms = uniform(self._state.seed[repeated], positions.flatten(), Stream.CHOICE)
        if self._mode is SamplingMode.SAMPLED:
            temperature, is_greedy = self._state.temperature[repeated], self._state.is_greedy[repeated]
            return sample_rows(logits, temperature, uniforms, is_greedy=is_greedy)
        return choose(self.probabilities(logits), uniforms)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the distributions it chooses from, [batch * width, vocab]."""
        repeated = self._rows.repeat_interleave(logits.shape[0] // len(self._rows))
        filtered = self._mode is SamplingMode.FILTERED
        return distribution(logits, self._state.sampling_rows(repeated, filtered=filtered, vocab_size=logits.shape[1]))

    def rejection_uniforms(self, positions: Tensor, draft_counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the random numbers that judge drafts [batch, width - 1] and draw corrections [batch, width].

        A row without drafts draws as in a round without drafts: what others do must not change its tokens.
        """
        seeds = self._state.seed[self._rows][:, None]
        accept = uniform(seeds, positions[:, :-1], Stream.ACCEPT)
        residual = uniform(seeds, positions, Stream.RESIDUAL)
        choice = uniform(seeds, positions, Stream.CHOICE)
        return accept, torch.where(draft_counts[:, None] > 0, residual, choice)

    def record_logprobs(self, logits: Tensor, tokens: Tensor) -> None:
        """Keep the log-probabilities of emitted tokens [batch, n]; `logits` [batch * n, vocab] decided them."""


class HostSampler(Sampler):
    """Decides for `requests`, whose whole text the host knows: nothing of theirs may be in flight.

    `drafts` are those being verified, if any: a chain [requests, depth], or a batch of trees.
    """

    def __init__(
        self, requests: list[Request], state: RowState, vocab_size: int, drafts: Tensor | DraftTree | None = None
    ) -> None:
        rows = state.tensor([request.running_row for request in requests])
        super().__init__(state, rows, SamplingMode.FILTERED)  # there is always something to add to the argmax
        depths = torch.zeros(len(requests), 1, dtype=torch.int64, device=state.device)
        if isinstance(drafts, DraftTree):
            depths = torch.cat([depths, drafts.depths], dim=1)
        elif drafts is not None:
            depths = torch.arange(drafts.shape[1] + 1, device=state.device).expand(len(requests), -1)
        self._sampling = SamplingRows.from_params(
            [request.params for request in requests],
            [request.seed for request in requests],
            vocab_size=vocab_size,
            device=state.device,
        ).repeat(depths.shape[1])
        self._history = _history(requests, state, vocab_size, drafts) if self._sampling.any_penalty else None
        early_stops = _forbidden(requests, state, vocab_size, depths)
        self._forbidden = _outside_grammar(masks_of(requests, drafts), early_stops, state, rows=depths.shape[1])
        wanted = [request.params.logprobs for request in requests if request.params.logprobs is not None]
        self._top = max(wanted, default=None)
        self.wants_logprobs = self._top is not None

    def choices(self, logits: Tensor, positions: Tensor) -> Tensor:
        sampling = self._sampling
        if sampling.all_greedy:
            return greedy(adjust_logits(logits, sampling, history=self._history, forbidden=self._forbidden))
        return choose(self.probabilities(logits), uniform(sampling.seed, positions.flatten(), Stream.CHOICE))

    def probabilities(self, logits: Tensor) -> Tensor:
        return distribution(logits, self._sampling, history=self._history, forbidden=self._forbidden)

    def record_logprobs(self, logits: Tensor, tokens: Tensor) -> None:
        if self._top is not None:
            logprobs = logits.float().log_softmax(-1)
            best = logprobs.topk(min(self._top, logprobs.shape[-1]), dim=-1)
            chosen = logprobs.gather(1, tokens.flatten().clamp(min=0)[:, None]).squeeze(1)  # padding is never read
            self.logprobs = LogprobsTensors(chosen=chosen, top_values=best.values, top_tokens=best.indices)


def _history(
    requests: list[Request], state: RowState, vocab_size: int, drafts: Tensor | DraftTree | None
) -> TokenHistory:
    """What each verify row has seen: the text so far and the drafts on the way to it."""
    history = TokenHistory.from_tokens(
        [request.prompt for request in requests],
        [request.output for request in requests],
        vocab_size=vocab_size,
        device=state.device,
    )
    if drafts is None:
        return history
    if isinstance(drafts, Tensor):
        return history.after_chain(drafts)
    grown = [
        TokenHistory(prompt_mask=mask[None], output_counts=counts[None]).after_tree(tokens, visibility(parents))
        for mask, counts, tokens, parents in zip(
            history.prompt_mask, history.output_counts, drafts.tokens, drafts.parents, strict=True
        )
    ]
    return TokenHistory(
        prompt_mask=torch.cat([one.prompt_mask for one in grown]),
        output_counts=torch.cat([one.output_counts for one in grown]),
    )


def _forbidden(requests: list[Request], state: RowState, vocab_size: int, depths: Tensor) -> Tensor | None:
    """Stop ids before `min_tokens`: bool [requests * rows, vocab], or None. `depths` [requests, rows]: drafts seen."""
    if all(request.num_output >= request.params.min_tokens for request in requests):
        return None
    stops = torch.zeros(len(requests), vocab_size, dtype=torch.bool)
    for i, request in enumerate(requests):
        stops[i, [token for token in request.stop_ids if token < vocab_size]] = True
    missing = state.tensor([request.params.min_tokens - request.num_output for request in requests])
    early = depths < missing[:, None]  # [requests, rows]
    return (early[:, :, None] & stops.to(state.device)[:, None]).flatten(0, 1)


def _outside_grammar(masks: list[Masks | None], forbidden: Tensor | None, state: RowState, rows: int) -> Tensor | None:
    """Add what grammars refuse to `forbidden`, bool [requests * rows, vocab] or None; return the same.

    Where a grammar leaves nothing but an end that `min_tokens` holds back, the grammar is right.
    """
    found = [
        (i * rows + row, mask)
        for i, of_request in enumerate(masks)
        for row, mask in enumerate(of_request or ())
        if mask is not None
    ]
    if not found:
        return forbidden
    index = state.tensor([place for place, _ in found])
    refused = ~torch.stack([mask for _, mask in found]).to(state.device)
    if forbidden is None:
        forbidden = refused.new_zeros(len(masks) * rows, refused.shape[1])
    both = forbidden[index] | refused
    forbidden[index] = torch.where(both.all(-1, keepdim=True), refused, both)
    return forbidden
