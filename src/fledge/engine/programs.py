"""Device programs of a fixed size: a round, the reading of prompts. What tells one from another, and what they read.

`graphs.py` captures them; `mixing.py` has those of both.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fledge.engine.adjustments import entries_adjusting
from fledge.engine.arms import Arm
from fledge.engine.device_state import DeviceState
from fledge.engine.logprobs import Asked
from fledge.engine.passes import PassOutcome, PrefillInputs, lay_out, run_prefill, run_round
from fledge.engine.request import Request
from fledge.engine.sampler import HostSampler, Sampler, SamplingMode
from fledge.engine.scheduler import Chunk


class RoundProgram(NamedTuple):
    """A round of one size: what distinguishes one captured round from another."""

    batch: int
    verify: Arm
    draft: Arm
    sampling: SamplingMode
    sample_drafts: bool = False  # the drafts of some chains are drawn at random
    asked: Asked = Asked()
    adjusting: int = 0  # entries
    admit: int | None = None  # drafts that are verified, over the batch; None: all

    @property
    def uses_drafter(self) -> bool:
        return self.draft.depth > 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.batch, self.asked.size, self.adjusting, self.admit or 0

    @property
    def kind(self) -> tuple[object, ...]:
        wishes = self.asked.top, self.adjusting > 0, self.admit is None
        return self.verify, self.draft, self.sampling, self.sample_drafts, wishes

    def inputs(self, state: DeviceState, requests: Sequence[Request]) -> Tensor:
        """Return their rows, and the padding row up to the batch's size; then which entries have which wishes."""
        rows = [request.running_row for request in requests]
        rows += [state.padding_row] * (self.batch - len(rows))
        adjusting = entries_adjusting(requests, self.adjusting, self.batch)
        return state.tensor([*rows, *self.asked.entries(requests), *adjusting])

    def unpack(self, state: DeviceState, packed: Tensor) -> tuple[Sampler, Tensor | None]:
        """Take apart what `inputs` put together; the second are the entries that ask for log-probabilities."""
        rows, asking, adjusting = packed.tensor_split((self.batch, self.batch + self.asked.size))
        changed = adjusting.view(2, -1) if self.adjusting else None
        return Sampler(state, rows, self.sampling, changed), asking if self.asked else None

    def run(self, state: DeviceState, packed: Tensor, on_host: Sequence[Request] = ()) -> PassOutcome:
        sampler, asking = self.unpack(state, packed)
        if on_host:
            sampler = HostSampler(on_host, state, state.drafted(sampler.rows, self.verify), sampler.adjusting)
        return run_round(
            state,
            sampler,
            verify=self.verify,
            draft=self.draft,
            sample_drafts=self.sample_drafts,
            admit=self.admit,
            asking=asking,
            top=self.asked.top,
        )


class PromptProgram(NamedTuple):
    """The reading of so many tokens: what distinguishes one captured prefill from another."""

    tokens: int
    chunks: int
    max_chunk: int
    draft: Arm
    has_drafter: bool  # it may have been given up
    sampling: SamplingMode
    sample_drafts: bool = False  # as of a round
    asked: Asked = Asked()
    adjusting: int = 0  # chunks

    @property
    def uses_drafter(self) -> bool:
        return self.has_drafter

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.tokens, self.chunks, self.max_chunk, self.asked.size, self.adjusting

    @property
    def kind(self) -> tuple[object, ...]:
        wishes = self.asked.top, self.adjusting > 0
        return self.draft, self.has_drafter, self.sampling, self.sample_drafts, wishes

    def inputs(self, state: DeviceState, chunks: Sequence[Chunk]) -> Tensor:
        requests = [chunk.request for chunk in chunks]
        adjusting = entries_adjusting(requests, self.adjusting, self.chunks)
        wishes = [*self.asked.entries(requests), *adjusting]
        return lay_out(state, chunks, tokens=self.tokens, rows=self.chunks, more=wishes)

    def unpack(self, state: DeviceState, packed: Tensor) -> tuple[PrefillInputs, Sampler]:
        inputs = PrefillInputs.of(
            packed, tokens=self.tokens, chunks=self.chunks, max_chunk=self.max_chunk, asked=self.asked.size
        )
        return inputs, Sampler(state, inputs.rows, self.sampling, inputs.adjusting if self.adjusting else None)

    def run(self, state: DeviceState, packed: Tensor, on_host: Sequence[Chunk] = ()) -> PassOutcome:
        inputs, sampler = self.unpack(state, packed)
        if any(chunk.chooses and chunk.request.needs_host for chunk in on_host):
            sampler = HostSampler([chunk.request for chunk in on_host], state, adjusting=sampler.adjusting)
        asks = any(chunk.prompt_rows for chunk in on_host)
        return run_prefill(
            state,
            inputs,
            sampler,
            draft=self.draft,
            sample_drafts=self.sample_drafts,
            top=self.asked.top,
            chunks=on_host if asks else (),
        )


class Program(Protocol):
    """What can be captured: a device program of a fixed size, told apart by its fields."""

    @property
    def uses_drafter(self) -> bool: ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """One with none of them smaller, of the same kind, does the same with more padding."""
        ...

    @property
    def kind(self) -> tuple[object, ...]:
        """All that is no size."""
        ...

    def inputs(self, state: DeviceState, work: Sequence[Any]) -> Tensor:
        """Lay out on the device what it is to work on; nothing: nobody's rows."""
        ...

    def run(self, state: DeviceState, packed: Tensor) -> Any: ...
