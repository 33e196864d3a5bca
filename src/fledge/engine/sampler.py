"""Which tokens the target chooses in a round.

`Sampler` needs nothing from the host and is what fast rounds use. `HostSampler` sees to what changes logits (penalties,
biases, stop ids held back, grammars) where the device has no slot for it. Both end in `decoding.sampling`, as the
reference loop does, or in kernels that agree with it.
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
    """What a round needs to sample on the device."""

    GREEDY = "greedy"  # every request is greedy
    SAMPLED = "sampled"

    @classmethod
    def needed_by(cls, requests: Sequence[Request]) -> "SamplingMode":
        return cls.GREEDY if all(request.kind is RequestKind.GREEDY for request in requests) else cls.SAMPLED


class Sampler:
    """Decides the target's tokens for `rows` by their settings in the device state. Can be captured in a graph.

    Logits are [batch * width, vocab]; positions [batch, width] of what they decide.
    """

    def __init__(self, state: DeviceState, rows: Tensor, mode: SamplingMode, adjusting: Tensor | None = None) -> None:
        """`adjusting` [2, n]: entries of the batch whose logits are adjusted, and their slots.

        What lies beyond the batch is nobody's.
        """
        self.is_greedy = mode is SamplingMode.GREEDY  # the choice is the argmax of the logits and nothing else
        self.rows = rows
        self.adjusting = adjusting
        self._state = state
        self._mode = mode

    def for_rows(self, rows: Tensor) -> "Sampler":
        """The same for other rows, by logits that are adjusted already."""
        return Sampler(self._state, rows, self._mode)

    def adjusted(self, logits: Tensor, positions: Tensor, at: Tensor | None = None) -> Tensor:
        """Return the logits that decide: with the rows of `adjusting` adjusted, in float32 then.

        `at` [batch, width]: which row of the logits decides each place, those of an entry in order, then its last again
        and again; None: all are in order.
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
        """Work out what drafts that were drawn are judged by; None: it takes `probabilities`."""
        if not are_weighed(logits) or self._state.verify_blocks:
            return None
        return weigh_rows(logits, self._requests(logits), self._state.row_settings)

    def choices(self, logits: Tensor, positions: Tensor, weighed: RowWeights | None = None) -> Tensor:
        """Return the target's own choice, [batch * width], by adjusted logits; `weighed`: what `weigh` made of them.

        All rows have their argmax, as where nobody is sampled; then those that are draw a token in its place.
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
        """Return the distributions it chooses from, [batch * width, vocab]."""
        requests = self._requests(logits)
        shaped = scaled_rows(logits, requests, self._state.row_settings)
        ids = torch.arange(logits.shape[1], device=logits.device)
        lost = self._state.sampling.is_greedy[requests, None] & (ids != argmax_rows(logits)[:, None])
        return shaped.masked_fill(lost, -torch.inf).softmax(-1)

    def _requests(self, logits: Tensor) -> Tensor:
        """Whose each row of the logits is: [batch * width]."""
        return self.rows.repeat_interleave(len(logits) // len(self.rows))

    def rejection_uniforms(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the random numbers that judge drafts [batch, width - 1] and draw corrections [batch, width]."""
        seeds = self._state.sampling.seed[self.rows][:, None]
        depths = torch.arange(positions.shape[1] - 1, device=positions.device)
        accept = uniform(seeds, in_round(positions[:, :-1], depths), Stream.ACCEPT)
        return accept, uniform(seeds, positions, Stream.RESIDUAL)


class HostSampler(Sampler):
    """Decides for `requests`, whose whole text the host knows: nothing of theirs may be in flight.

    `drafts` are those being verified, if any: a chain [requests, depth], or a batch of trees.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        state: DeviceState,
        drafts: Tensor | DraftTree | None = None,
        adjusting: Tensor | None = None,
    ) -> None:
        rows = state.tensor([request.running_row for request in requests])
        # There is always something to add to the argmax. What slots are for the host does here, for all.
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
        return logits  # the host adjusts as it chooses

    def weigh(self, logits: Tensor) -> RowWeights | None:  # noqa: ARG002
        return None

    def choices(self, logits: Tensor, positions: Tensor, weighed: RowWeights | None = None) -> Tensor:  # noqa: ARG002
        places = positions.flatten()
        return choose_at(logits, self._sampling, places, history=self._history, forbidden=self._forbidden)

    def probabilities(self, logits: Tensor) -> Tensor:
        return distribution(logits, self._sampling, history=self._history, forbidden=self._forbidden)


def _history(requests: Sequence[Request], state: DeviceState, drafts: Tensor | DraftTree | None) -> TokenHistory:
    """What each verify row has seen: the text so far and the drafts on the way to it."""
    prompts, outputs = [request.prompt for request in requests], [request.output for request in requests]
    history = TokenHistory.from_tokens(prompts, outputs, vocab_size=state.vocab_size, device=state.device)
    if isinstance(drafts, DraftTree):
        return history.after_tree(drafts.tokens, visibility(drafts.parents))
    return history if drafts is None else history.after_chain(drafts)


def _forbidden(
    requests: Sequence[Request], state: DeviceState, depths: Tensor, masks: Sequence[Masks | None]
) -> Tensor | None:
    """Stop ids before `min_tokens` and what grammars refuse: bool [requests * rows, vocab]; None: nothing.

    `depths` [requests, rows]: drafts seen. Where a grammar leaves nothing but an end that `min_tokens` holds back, the
    grammar is right.
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
    """Return each request's masks, row by row as they are verified; None for a request without a constraint.

    `drafts` are those being verified: chains [requests, depth], or a batch of trees. Rows that only a refused draft
    leads to are left out at the end of a chain, and None in a tree: what is chosen there is never looked at. A
    constraint that fails is noted in its request, which then ends with its next tokens.
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
    """The same for one request, with a chain of drafts, or with a tree."""
    constraint = request.constraint
    if constraint is None or request.failure is not None:
        return None
    try:
        return constraint.masks(tokens) if parents is None else _tree_masks(constraint, tokens, parents)
    except Exception as error:  # the grammar's parser is not ours; whatever it does, it concerns one request
        request.fail_constraint(error)
        return None


def _tree_masks(constraint: TokenConstraint, tokens: Sequence[int], parents: Sequence[int]) -> Masks:
    """Return the masks of a tree's verify rows: the root, then each node after itself."""
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
