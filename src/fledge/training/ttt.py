"""Training-time test: the drafter is unrolled from every slot at once, as serving unrolls it, with a loss at each step.

`Teacher` computes the labels: the target's distribution after every token of a batch.

Draft step k of slot t, for a text x0 x1 x2 ... of one document:

    reads       token x[t+1+k] of the text; at k = 0 the fused target feature, afterwards its own state of step k - 1
    position    t + k
    label       the target's distribution after x[t+1+k]

A slot keeps its place in the row. With k, the tokens, labels and loss mask are shifted (`training.data.examples`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.kernels.draft_loss import draft_loss
from fledge.models.config import Architecture
from fledge.models.drafter.base import Drafter, DraftStates, DraftVocabulary
from fledge.models.target.decoder import TargetStates
from fledge.training.attention import Backend, Blocks, DocumentLayout, TttStorage, compiled
from fledge.training.data.examples import PackedBatch, map_tensors, shifted
from fledge.training.recipe import FitSection

HARMLESS_TOKEN = 0  # read by slots whose draft step lies beyond the end of their document
CHUNK_ROWS = 2048  # rows of the teacher's logits over the full vocabulary that exist at a time


@dataclass(frozen=True)
class TeacherLogits:
    """The target's view of a batch, N = rows * length, flat."""

    draft_logits: Tensor  # [N, draft_vocab]: of the draft vocabulary's tokens
    log_total: Tensor  # [N] float32: logsumexp over the full vocabulary
    choice: Tensor  # [N] int64: the target's best token, full vocabulary
    choice_in_draft: Tensor  # [N] bool


class Teacher:
    """Turns final hidden states into `TeacherLogits`, some rows at a time.

    With a draft vocabulary, the full vocabulary's logits of a whole batch never exist at once.
    """

    def __init__(
        self, head_weight: Tensor, vocabulary: DraftVocabulary | None, *, head_bias: Tensor | None = None
    ) -> None:
        self._weight, self._bias = head_weight, head_bias  # [vocab, hidden], [vocab]
        self._ids = self._in_draft = None
        if vocabulary is not None:
            self._ids, self._in_draft = (x.to(head_weight.device) for x in (vocabulary.target_ids, vocabulary.in_draft))

    @torch.no_grad()
    def __call__(self, final: Tensor) -> TeacherLogits:
        """Final states [rows, length, hidden], after the target's last norm."""
        states = final.flatten(0, -2)
        # Compiled, it makes no float32 copy of the logits.
        summary = compiled(_summary, dynamic=True) if states.is_cuda else _summary
        draft_size = len(self._weight if self._ids is None else self._ids)
        draft_logits = torch.empty(len(states), draft_size, dtype=self._weight.dtype, device=states.device)
        parts = []
        with torch.autocast(states.device.type, enabled=False):
            for rows, place in zip(torch.split(states, CHUNK_ROWS), torch.split(draft_logits, CHUNK_ROWS), strict=True):
                logits = F.linear(rows.to(self._weight.dtype), self._weight, self._bias)
                # From the same matrix product as the logsumexp, so that the probabilities are exact.
                if self._ids is None:
                    place.copy_(logits)
                else:
                    torch.index_select(logits, 1, self._ids, out=place)
                parts.append(summary(logits))
        log_total, choice = (torch.cat(each) for each in zip(*parts, strict=True))
        inside = torch.ones_like(choice, dtype=torch.bool) if self._in_draft is None else self._in_draft[choice]
        return TeacherLogits(draft_logits, log_total, choice, inside)


def _summary(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, vocab] -> logsumexp [rows] float32 and best token [rows]."""
    return logits.float().logsumexp(-1), logits.argmax(-1)


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What one draft step reads besides the slots' features."""

    tokens: Tensor  # [rows, length] int64
    positions: Tensor  # [rows, length] int64
    supervised: Tensor  # [rows, length] bool
    target_rows: Tensor  # [rows * length] int64: which target distribution teaches each slot

    @classmethod
    def of(cls, batch: PackedBatch, step: int) -> "StepInputs":
        same = shifted(batch.document, step + 1, fill=-2) == batch.document
        slots = torch.arange(batch.length, device=batch.tokens.device)
        teachers = (slots + step + 1).clamp(max=batch.length - 1)
        rows = torch.arange(batch.rows, device=batch.tokens.device)[:, None] * batch.length
        return cls(
            tokens=shifted(batch.tokens, step + 1, fill=HARMLESS_TOKEN).where(same, HARMLESS_TOKEN),
            positions=batch.positions + step,
            supervised=batch.supervised(step),
            target_rows=(rows + teachers).flatten(),
        )


@dataclass(kw_only=True)
class TttMetrics:
    """Sums over supervised slots by draft step. Tensors are [depth] unless noted; nothing waits for the device.

    Sums of micro-batches, processes and steps are added; means are computed when a line of the log is written.
    `tensors()` returns the sums themselves, for an all-reduce in place.
    """

    supervised: Tensor  # int64: supervised slots
    outside: Tensor  # int64: of these, slots whose target choice is not in the draft vocabulary; they add no loss
    correct: Tensor  # int64: slots where the drafter's choice is the target's
    loss: Tensor  # float64
    feature_loss: Tensor  # float64: EAGLE-1's smooth L1
    overlap: Tensor  # float64: chance that a sampled draft is accepted, 0 outside the vocabulary
    tally: Tensor  # int64 [depth + 1, depth + 1]: simulated rounds, by drafted and accepted tokens
    recorded: Tensor  # int64: supervised slots of the steps that recorded the four sums below
    hidden_rms: Tensor  # float64: RMS of the state that is fed to the next step
    head_rms: Tensor  # float64: RMS of the state that the head reads
    own_attention: Tensor  # float64: mass on the drafter's own earlier drafts
    sink_attention: Tensor  # float64: mass on the document's first token
    steps: Tensor  # float64 [3]: loss and gradient norm of whole optimizer steps, and their number

    @classmethod
    def zeros(cls, depth: int, device: torch.device | str = "cpu") -> "TttMetrics":
        counts = {"supervised", "outside", "correct", "tally", "recorded"}
        shapes = {"tally": (depth + 1, depth + 1), "steps": (3,)}
        kinds = {f.name: torch.int64 if f.name in counts else torch.float64 for f in fields(cls)}
        return cls(**{n: torch.zeros(shapes.get(n, (depth,)), dtype=kinds[n], device=device) for n in kinds})

    def add(self, other: "TttMetrics", good: Tensor | None = None) -> None:
        """Add in place. A step that is not good (bool scalar) adds nothing: its numbers may be NaN."""
        for total, part in zip(self.tensors(), other.tensors(), strict=True):
            total.add_(part if good is None else part.where(good, 0))

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in fields(self)]

    def acceptance(self) -> AcceptanceStatistics:
        """Acceptance as if every slot supervised at step 0 were a round: drafts count until the first wrong one."""
        statistics = AcceptanceStatistics()
        for drafted, row in enumerate(self.tally.tolist()):
            for accepted, rounds in enumerate(row[: drafted + 1]):
                statistics.add(drafted=drafted, accepted=accepted, rounds=rounds)
        return statistics

    def report(self) -> dict[str, Any]:
        """Return means as JSON values; None where nothing was supervised. Waits for the device."""
        supervised, recorded = self.supervised.tolist(), self.recorded.tolist()
        acceptance, total = self.acceptance(), sum(supervised)
        loss, norm, steps = self.steps.tolist()

        def means(sums: Tensor, counts: list[int] = supervised) -> list[float | None]:
            return [value / count if count else None for value, count in zip(sums.tolist(), counts, strict=True)]

        report: dict[str, Any] = {
            "loss": loss / steps if steps else None,
            "grad_norm": norm / steps if steps else None,
            "loss_by_depth": means(self.loss),
            "accuracy_by_depth": means(self.correct),
            "overlap_by_depth": means(self.overlap),
            "outside_vocabulary": int(self.outside.sum()) / total if total else None,
            "simulated_acceptance_length": acceptance.acceptance_length,
            "simulated_acceptance_by_depth": list(acceptance.rate_by_depth),
            "supervised": supervised,
        }
        if bool(self.feature_loss.any()):
            report["feature_loss_by_depth"] = means(self.feature_loss)
        if any(recorded):
            for name in ("hidden_rms", "head_rms", "own_attention", "sink_attention"):
                report[f"{name}_by_depth"] = means(getattr(self, name), recorded)
        return report


class TttOutputs(NamedTuple):
    """One batch's part of an optimizer step. A tuple, because DDP and FSDP2 look for tensors in tuples."""

    loss: Tensor  # scalar, differentiable
    metrics: TttMetrics


class TttModel(nn.Module):
    """The module that training calls, and that DDP and FSDP2 wrap: one forward pass runs all draft steps of a batch.

    loss = sum over k of decay**k * (sum over supervised slots of the loss at step k) / denominators[k], `denominators`
    [depth] being the numbers of supervised slots of the whole optimizer step: all micro-batches of all processes. Slots
    whose target choice lies outside the draft vocabulary add no loss, but are in the denominator and count as misses.
    Nothing waits for the device.
    """

    def __init__(self, drafter: Drafter, fit: FitSection, *, backend: Backend = "auto") -> None:
        super().__init__()
        self.drafter, self.fit, self.backend = drafter, fit, backend
        self.compiled = fit.compile == "on" or (fit.compile == "auto" and next(drafter.parameters()).is_cuda)

    def forward(
        self,
        batch: PackedBatch,
        states: TargetStates,
        teacher: TeacherLogits,
        denominators: Tensor,
        record: bool = False,
    ) -> TttOutputs:
        fit, device = self.fit, batch.tokens.device
        dtype = next(self.drafter.parameters()).dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        states = map_tensors(states, lambda x: x.to(dtype))
        step_of: Any = functools.partial(self._step, DocumentLayout(batch, backend=self.backend), teacher, record)
        if fit.activation_checkpointing:
            step_of = functools.partial(checkpoint, step_of, use_reentrant=False)
        feature: Tensor = self._run(type(self.drafter).fuse, states)
        blocks: Blocks = ()
        losses, supervised, correct, metrics = [], [], [], TttMetrics.zeros(fit.depth, device)
        for step in range(fit.depth):
            inputs = StepInputs.of(batch, step)
            weight = fit.depth_decay**step / denominators[step].to(torch.float32).clamp(min=1)
            wanted = None
            if self.drafter.config.architecture is Architecture.EAGLE1:
                # EAGLE-1 is also trained to predict the target's final state after the token it reads.
                wanted = shifted(states.final.detach(), step + 1, fill=0.0)
            # Rounded as in serving. A wider state would also make every later activation wider.
            feature, blocks, loss, right, sums = step_of(inputs, weight, feature.to(dtype), blocks, wanted)
            losses.append(loss)
            supervised.append(inputs.supervised.flatten())
            correct.append(right)
            for name, value in sums.items():
                getattr(metrics, name)[step] = value
        metrics.tally = rounds_by_length(torch.stack(supervised), torch.stack(correct))
        return TttOutputs(loss=torch.stack(losses).sum(), metrics=metrics)

    def _run(self, method: Callable[..., Any], *inputs: Any) -> Any:
        """Call a method of the drafter, compiled if `self.compiled`."""
        return (compiled(method) if self.compiled else method)(self.drafter, *inputs)

    def _step(
        self,
        layout: DocumentLayout,
        teacher: TeacherLogits,
        record: bool,
        inputs: StepInputs,
        weight: Tensor,
        feature: Tensor,
        blocks: Blocks,
        wanted: Tensor | None,
    ) -> tuple[Tensor, Blocks, Tensor, Tensor, dict[str, Tensor]]:
        """One draft step of every slot. It mutates nothing, so that activation checkpointing can run it twice.

        Returns the next step's feature [rows, length, hidden] and blocks, the weighted loss, a mask of the supervised
        slots that are right, bool [rows * length], and sums without gradient by their names in `TttMetrics`.
        """
        drafter, fit, supervised = self.drafter, self.fit, inputs.supervised.flatten()
        storage = TttStorage(layout, record=record, earlier=blocks)
        states: DraftStates = self._run(type(drafter).forward, inputs.tokens, feature, inputs.positions, storage)
        inside = supervised & teacher.choice_in_draft[inputs.target_rows]
        result = draft_loss(
            drafter.logits(states.head).flatten(0, 1),
            teacher.draft_logits,
            inputs.target_rows,
            teacher.log_total,
            inside * weight,
            kind=fit.loss,
            kl_weight=fit.kl_weight,
        )
        loss, slot_values = result.total, {"loss": result.row_loss, "overlap": result.overlap}
        if wanted is not None:
            each = F.smooth_l1_loss(states.head.float(), wanted.float(), reduction="none").mean(-1).flatten()
            loss = loss + fit.feature_weight * (each * (supervised * weight)).sum()
            slot_values["feature_loss"] = each
        correct = inside & (drafter.to_target_ids(result.choice) == teacher.choice[inputs.target_rows])
        with torch.no_grad():
            count = supervised.sum()
            sums = {"supervised": count, "outside": (supervised & ~inside).sum(), "correct": correct.sum()}
            if record:
                sums["recorded"] = count
                masses = [passes[-1] for passes in storage.masses.values()]  # one for each layer
                for name, state in (("hidden_rms", states.feature), ("head_rms", states.head)):
                    slot_values[name] = state.float().square().mean(-1).sqrt()
                slot_values["own_attention"] = torch.stack([mass.own for mass in masses]).mean(0)
                slot_values["sink_attention"] = torch.stack([mass.sink for mass in masses]).mean(0)
            sums |= {name: x.flatten().double().where(supervised, 0.0).sum() for name, x in slot_values.items()}
        return states.feature, storage.blocks, loss, correct, sums


@torch.no_grad()
def rounds_by_length(supervised: Tensor, correct: Tensor) -> Tensor:
    """Count the rounds that serving would have: one from each slot, as deep as the slot is supervised.

    Both bool [depth, slots]. A round ends where its answer ends; later answers in the same row are not part of it.
    Returns int64 [depth + 1, depth + 1]: rounds by drafted and accepted. Slots that draft nothing are not counted.
    """
    drafted, accepted = (each.cumprod(0).sum(0) for each in (supervised, supervised & correct))
    size = len(supervised) + 1
    counts = drafted.new_zeros(size * size)
    counts.scatter_add_(0, drafted * size + accepted, (drafted > 0).long())
    return counts.view(size, size)
