"""Device programs of a fixed size: rounds and prefill, with their parameters and packed inputs.

`graphs.py` captures them as CUDA graphs; `mixing.py` has the program that does both in one pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fledge.engine.adjustments import entries_adjusting
from fledge.engine.arms import Arm
from fledge.engine.device_state import DeviceState
from fledge.engine.logprobs import Asked
from fledge.engine.passes import PassOutcome, PrefillInputs, pack_prefill, run_prefill, run_round
from fledge.engine.request import Request
from fledge.engine.sampler import HostSampler, Sampler, SamplingMode
from fledge.engine.scheduler import Chunk


class RoundProgram(NamedTuple):
    """A round of one size. The fields are all that distinguishes captured rounds."""

    batch: int
    verify: Arm
    draft: Arm
    sampling: SamplingMode
    sample_drafts: bool = False  # the drafts of some chains are sampled
    asked: Asked = Asked()
    adjusting: int = 0  # number of entries with adjusted logits
    admit: int | None = None  # number of drafts to verify over the batch; None: all

    @property
    def uses_drafter(self) -> bool:
        return self.draft.depth > 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.batch, self.asked.size, self.adjusting, self.admit or 0

    @property
    def kind(self) -> tuple[object, ...]:
        options = self.asked.top, self.adjusting > 0, self.admit is None
        return self.verify, self.draft, self.sampling, self.sample_drafts, options

    def inputs(self, state: DeviceState, requests: Sequence[Request]) -> Tensor:
        """Pack the requests' rows, padded to the batch size, and the entries with log-probabilities or adjustments."""
        rows = [request.running_row for request in requests]
        rows += [state.padding_row] * (self.batch - len(rows))
        adjusting = entries_adjusting(requests, self.adjusting, self.batch)
        return state.tensor([*rows, *self.asked.entries(requests), *adjusting])

    def unpack(self, state: DeviceState, packed: Tensor) -> tuple[Sampler, Tensor | None]:
        """Unpack `inputs`: the sampler, and the entries that get log-probabilities."""
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
    """Prefill of one size. The fields are all that distinguishes captured ones."""

    tokens: int
    chunks: int
    max_chunk: int
    draft: Arm
    has_drafter: bool  # false also after the drafter failed
    sampling: SamplingMode
    sample_drafts: bool = False  # the drafts of some chains are sampled
    asked: Asked = Asked()
    adjusting: int = 0  # number of chunks with adjusted logits

    @property
    def uses_drafter(self) -> bool:
        return self.has_drafter

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.tokens, self.chunks, self.max_chunk, self.asked.size, self.adjusting

    @property
    def kind(self) -> tuple[object, ...]:
        options = self.asked.top, self.adjusting > 0
        return self.draft, self.has_drafter, self.sampling, self.sample_drafts, options

    def inputs(self, state: DeviceState, chunks: Sequence[Chunk]) -> Tensor:
        requests = [chunk.request for chunk in chunks]
        adjusting = entries_adjusting(requests, self.adjusting, self.chunks)
        entries = [*self.asked.entries(requests), *adjusting]
        return pack_prefill(state, chunks, tokens=self.tokens, rows=self.chunks, entries=entries)

    def unpack(self, state: DeviceState, packed: Tensor) -> tuple[PrefillInputs, Sampler]:
        inputs = PrefillInputs.of(
            packed, tokens=self.tokens, chunks=self.chunks, max_chunk=self.max_chunk, asked=self.asked.size
        )
        return inputs, Sampler(state, inputs.rows, self.sampling, inputs.adjusting if self.adjusting else None)

    def run(self, state: DeviceState, packed: Tensor, on_host: Sequence[Chunk] = ()) -> PassOutcome:
        inputs, sampler = self.unpack(state, packed)
        if any(chunk.chooses and chunk.request.needs_host for chunk in on_host):
            sampler = HostSampler([chunk.request for chunk in on_host], state, adjusting=sampler.adjusting)
        has_prompt_logprobs = any(chunk.prompt_rows for chunk in on_host)
        return run_prefill(
            state,
            inputs,
            sampler,
            draft=self.draft,
            sample_drafts=self.sample_drafts,
            top=self.asked.top,
            chunks=on_host if has_prompt_logprobs else (),
        )


class Program(Protocol):
    """A device program of a fixed size, identified by its fields; can be captured."""

    @property
    def uses_drafter(self) -> bool: ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """A program of the same kind whose sizes are all at least these does the same work, with more padding."""
        ...

    @property
    def kind(self) -> tuple[object, ...]:
        """All fields that are not sizes."""
        ...

    def inputs(self, state: DeviceState, work: Sequence[Any]) -> Tensor:
        """Pack the work (requests or chunks) into one tensor on the device; empty `work` means padding only."""
        ...

    def run(self, state: DeviceState, packed: Tensor) -> Any: ...
