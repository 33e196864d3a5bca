"""Sampling of the target's tokens in a round.

`Sampler` needs nothing from the host. `HostSampler` adjusts logits on the host (penalties, biases, min_tokens,
grammars) if the device has no slot for a request. Both use `decoding.sampling`, as the reference loop does, or kernels
that agree with it.
"""

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from fledge.decoding.random import Stream, in_round, uniform
from fledge.decoding.sampling import SamplingRows, TokenHistory, choose_at, distribution
from fledge.decoding.tree import DraftTree, visibility
from fledge.engine.arms import RequestKind
from fledge.engine.constraint import Masks, TokenConstraint
from fledge.engine.device_state import DeviceState
from fledge.engine.request import Request
from fledge.kernels._triton import runs_triton
from fledge.kernels.adjust import AdjustedEntries, adjust_rows
from fledge.kernels.argmax import argmax_rows
from fledge.kernels.filters import scaled_rows
from fledge.kernels.sample import RowWeights, are_weighed, draw_rows, sample_rows, weigh_rows


class SamplingMode(StrEnum):
    """Whether a batch needs sampling."""

    GREEDY = "greedy"  # all requests are greedy
    SAMPLED = "sampled"

    @classmethod
    def needed_by(cls, requests: Sequence[Request]) -> "SamplingMode":
        return cls.GREEDY if all(request.kind is RequestKind.GREEDY for request in requests) else cls.SAMPLED


class Sampler:
    """Chooses the target's tokens for `rows` with their settings in the device state. Can be captured in a graph.

    Logits are [batch * width, vocab]; `positions` [batch, width] are those of the tokens to choose.
    """

    def __init__(self, state: DeviceState, rows: Tensor, mode: SamplingMode, adjusting: Tensor | None = None) -> None:
        """`adjusting` [2, n]: entries of the batch whose logits are adjusted, and their slots.

        Entries beyond the batch are padding.
        """
        self.is_greedy = mode is SamplingMode.GREEDY  # every choice is an argmax
        self.rows = rows
        self.adjusting = adjusting
        self._state = state
        self._mode = mode

    def for_rows(self, rows: Tensor) -> "Sampler":
        """Return a sampler for other rows, for logits that are already adjusted."""
        return Sampler(self._state, rows, self._mode)

    def adjusted(self, logits: Tensor, positions: Tensor, at: Tensor | None = None) -> Tensor:
        """Return the logits with those of `adjusting` entries adjusted (in float32 if there are such entries).

        `at` [batch, width]: the row of the logits for each position; an entry's rows are in order, and its last one may
        repeat. None: rows are in the order of `positions`.
        """
        if self.adjusting is None:
            return logits
        if runs_triton(logits):
            adjusted = AdjustedEntries(self.adjusting, self.rows, positions, at)
            return adjust_rows(logits, self._state.drafts, adjusted, self._state.adjustments.tables)
        batch, width = positions.shape
        entries, slots = self.adjusting[:, self.adjusting[0] < batch]
        places = torch.arange(width, device=entries.device)
        own = entries[:, None] * width + places if at is None else at[entries]
        drafts = self._state.drafts[self.rows[entries], : width - 1]
        changed = self._state.adjustments.adjust(logits[own.flatten()], slots, positions[entries], drafts)
        decides = own == own[:, :1] + places
        return logits.float().index_copy(0, own[decides], changed[decides.flatten()])

    def weigh(self, logits: Tensor) -> RowWeights | None:
        """Compute the row weights for rejection sampling; None if `probabilities` are needed instead."""
        if not are_weighed(logits) or self._state.verify_blocks:
            return None
        return weigh_rows(logits, self._requests(logits), self._state.row_settings)

    def choices(self, logits: Tensor, positions: Tensor, weighed: RowWeights | None = None) -> Tensor:
        """Return the target's choices [batch * width] from adjusted logits. `weighed`: the result of `weigh`, if any.

        First the argmax of all rows, as in a greedy batch; then sampled rows replace it by a sample.
        """
        chosen = argmax_rows(logits)
        if self.is_greedy:
            return chosen
        requests = self._requests(logits) if weighed is None else weighed.request
        uniforms = uniform(self._state.sampling.seed[requests], positions.flatten(), Stream.CHOICE)
        if weighed is None:
            sample_rows(logits, requests, self._state.row_settings, uniforms, chosen)
        else:
            draw_rows(weighed, uniforms, chosen)
        return chosen

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the target's distributions, [batch * width, vocab]; greedy rows are one-hot."""
        requests = self._requests(logits)
        shaped = scaled_rows(logits, requests, self._state.row_settings)
        ids = torch.arange(logits.shape[1], device=logits.device)
        lost = self._state.sampling.is_greedy[requests, None] & (ids != argmax_rows(logits)[:, None])
        return shaped.masked_fill(lost, -torch.inf).softmax(-1)

    def _requests(self, logits: Tensor) -> Tensor:
        """Return the state row of each row of the logits: [batch * width]."""
        return self.rows.repeat_interleave(len(logits) // len(self.rows))

    def rejection_uniforms(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the random numbers to accept drafts [batch, width - 1] and to sample corrections [batch, width]."""
        seeds = self._state.sampling.seed[self.rows][:, None]
        depths = torch.arange(positions.shape[1] - 1, device=positions.device)
        accept = uniform(seeds, in_round(positions[:, :-1], depths), Stream.ACCEPT)
        return accept, uniform(seeds, positions, Stream.RESIDUAL)


class HostSampler(Sampler):
    """Chooses tokens for `requests` with settings from the host, which must know all their tokens: none in flight.

    `drafts`: those being verified, if any: chains [requests, depth], or a batch of trees.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        state: DeviceState,
        drafts: Tensor | DraftTree | None = None,
        adjusting: Tensor | None = None,
    ) -> None:
        rows = state.tensor([request.running_row for request in requests])
        # Never greedy: the host adjusts the logits of all requests here, those with slots included.
        super().__init__(state, rows, SamplingMode.SAMPLED, adjusting)
        depths = torch.zeros(len(requests), 1, dtype=torch.int64, device=state.device)
        if isinstance(drafts, DraftTree):
            depths = torch.cat([depths, drafts.depths], dim=1)
        elif drafts is not None:
            depths = torch.arange(drafts.shape[1] + 1, device=state.device).expand(len(requests), -1)
        self._sampling = SamplingRows.from_params(
            [request.params for request in requests],
            [request.seed for request in requests],
            vocab_size=state.vocab_size,
            device=state.device,
        ).repeat(depths.shape[1])
        self._history = _history(requests, state, drafts) if self._sampling.any_penalty else None
        self._forbidden = _forbidden(requests, state, depths, masks_of(requests, drafts))

    def adjusted(self, logits: Tensor, positions: Tensor, at: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return logits  # `choices` and `probabilities` adjust them

    def weigh(self, logits: Tensor) -> RowWeights | None:  # noqa: ARG002
        return None

    def choices(self, logits: Tensor, positions: Tensor, weighed: RowWeights | None = None) -> Tensor:  # noqa: ARG002
        places = positions.flatten()
        return choose_at(logits, self._sampling, places, history=self._history, forbidden=self._forbidden)

    def probabilities(self, logits: Tensor) -> Tensor:
        return distribution(logits, self._sampling, history=self._history, forbidden=self._forbidden)


def _history(requests: Sequence[Request], state: DeviceState, drafts: Tensor | DraftTree | None) -> TokenHistory:
    """Return each verify row's tokens so far: the request's and the drafts before the row."""
    prompts, outputs = [request.prompt for request in requests], [request.output for request in requests]
    history = TokenHistory.from_tokens(prompts, outputs, vocab_size=state.vocab_size, device=state.device)
    if isinstance(drafts, DraftTree):
        return history.after_tree(drafts.tokens, visibility(drafts.parents))
    return history if drafts is None else history.after_chain(drafts)


def _forbidden(
    requests: Sequence[Request], state: DeviceState, depths: Tensor, masks: Sequence[Masks | None]
) -> Tensor | None:
    """Return the tokens that `min_tokens` and grammars forbid: bool [requests * rows, vocab]; None if there are none.

    `depths` [requests, rows]: number of drafts before each row. If a grammar allows nothing but an end that
    `min_tokens` forbids, it is allowed.
    """
    rows = depths.shape[1]
    found = [
        (i * rows + row, mask)
        for i, of_request in enumerate(masks)
        for row, mask in enumerate(of_request or ())
        if mask is not None
    ]
    missing = [request.params.min_tokens - request.num_output for request in requests]
    if not found and max(missing) <= 0:
        return None
    forbidden = torch.zeros(len(requests) * rows, state.vocab_size, dtype=torch.bool, device=state.device)
    for i, request in enumerate(requests):
        if missing[i] > 0:
            stops = state.tensor([token for token in request.stop_ids if token < state.vocab_size])
            forbidden[i * rows : (i + 1) * rows, stops] = (depths[i] < missing[i])[:, None]
    if found:
        index = state.tensor([place for place, _ in found])
        refused = ~torch.stack([mask for _, mask in found]).to(state.device)
        both = forbidden[index] | refused
        forbidden[index] = torch.where(both.all(-1, keepdim=True), refused, both)
    return forbidden


def masks_of(requests: Sequence[Request], drafts: Tensor | DraftTree | None) -> list[Masks | None]:
    """Return each request's masks for its verify rows; None for a request without a constraint.

    `drafts`: those being verified, chains [requests, depth] or a batch of trees. Rows after a draft that the grammar
    refuses are omitted at the end of a chain and None in a tree: they are not used. If a constraint fails, that is
    recorded in its request, which ends when its next tokens are read.
    """
    found: list[Masks | None] = [None] * len(requests)
    if all(request.constraint is None for request in requests):
        return found
    tokens: list[list[int]] = [[]] * len(requests)
    parents: list[list[int]] | None = None
    if isinstance(drafts, DraftTree):
        tokens, parents = drafts.tokens.tolist(), drafts.parents.tolist()
    elif drafts is not None:
        tokens = drafts.tolist()
    for i, request in enumerate(requests):
        found[i] = masks_after(request, tokens[i], None if parents is None else parents[i])
    return found


def masks_after(request: Request, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Masks | None:
    """Return the masks of one request for a chain of drafts or, with `parents`, for a tree; see `masks_of`."""
    constraint = request.constraint
    if constraint is None or request.failure is not None:
        return None
    try:
        return constraint.masks(tokens) if parents is None else _tree_masks(constraint, tokens, parents)
    except Exception as error:  # the parser is a third party's: its errors end this request only
        request.fail_constraint(error)
        return None


def _tree_masks(constraint: TokenConstraint, tokens: Sequence[int], parents: Sequence[int]) -> Masks:
    """Return the masks of a tree's verify rows: after the root, then after each node."""
    rows: Masks = [None] * (len(tokens) + 1)
    covered: set[int] = set()
    for leaf in reversed(range(len(tokens))):  # children come after parents: the last uncovered node is a leaf
        if leaf not in covered:
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            covered.update(path)
            for node, mask in zip([-1, *path], constraint.masks([tokens[node] for node in path]), strict=False):
                rows[node + 1] = mask
    return rows
