"""Training-time test: the drafter is unrolled as serving unrolls it, from every slot at once, and taught at each step.

Draft step k of slot t, for a text x0 x1 x2 ... of one document:

    reads       token x[t+1+k], the real one; the fused target feature at k = 0, its own state of step k - 1 afterwards
    sits at     position t + k
    is taught   the target's distribution after x[t+1+k]

Slots do not move: what shifts with k are tokens, teachers and the mask of what counts (see `fledge.training.batch`).
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fledge.kernels.draft_loss import LossKind, draft_loss
from fledge.models.config import Architecture
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.target.decoder import TargetStates
from fledge.training.batch import PackedBatch, shifted
from fledge.training.metrics import TttMetrics
from fledge.training.recipe import FitSection
from fledge.training.teacher import TeacherLogits
from fledge.training.ttt_attention import AttentionMass, Backend, Blocks, DocumentLayout, TttStorage

HARMLESS_TOKEN = 0  # read by slots that have run past their document


@dataclass(frozen=True, kw_only=True)
class TttSettings:
    """What is optimised."""

    depth: int
    depth_decay: float = 0.8  # weight of step k is decay ** k
    loss: LossKind = "soft_ce"
    kl_weight: float = 0.0
    feature_weight: float = 0.1  # EAGLE-1: of the smooth-L1 loss between its state and the target's

    @classmethod
    def from_section(cls, fit: FitSection) -> "TttSettings":
        return cls(
            depth=fit.depth,
            depth_decay=fit.depth_decay,
            loss=fit.loss,
            kl_weight=fit.kl_weight,
            feature_weight=fit.feature_weight,
        )


@dataclass(frozen=True, kw_only=True)
class TttResult:
    """One batch's share of an optimizer step."""

    loss: Tensor  # scalar, differentiable
    metrics: TttMetrics


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What one draft step reads besides the slots' features."""

    tokens: Tensor  # [rows, length] int64
    positions: Tensor  # [rows, length] int64
    taught: Tensor  # [rows, length] bool
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
            taught=batch.supervised(step),
            target_rows=(rows + teachers).flatten(),
        )


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one draft step leaves: the next one's inputs, its loss, and per-slot figures without gradient."""

    feature: Tensor  # [rows, length, hidden]
    blocks: Blocks
    loss: Tensor  # scalar, weighted
    row_loss: Tensor  # [rows * length] float32, as the next three
    overlap: Tensor
    correct: Tensor  # bool
    feature_loss: Tensor | None
    signals: "Signals | None"


@dataclass(frozen=True, kw_only=True)
class Signals:
    """Signs of drift, float32 [rows, length]."""

    hidden_rms: Tensor
    head_rms: Tensor
    sink: Tensor
    own: Tensor


def unroll(
    drafter: Drafter,
    batch: PackedBatch,
    states: TargetStates,
    teacher: TeacherLogits,
    settings: TttSettings,
    *,
    denominators: Tensor,
    record: bool = False,
    checkpointing: bool = False,
    backend: Backend = "auto",
    compiled: bool = False,
    layout: DocumentLayout | None = None,
) -> TttResult:
    """Return the loss of all draft steps over a batch, and what they were like.

    loss = sum over k of decay**k * (sum over taught slots of the loss at step k) / denominators[k], `denominators`
    [depth] being the numbers of taught slots of the whole optimizer step: all micro-batches of all processes. Slots
    whose target choice lies outside the draft vocabulary add no loss, but are in the denominator and count as misses.

    `checkpointing` keeps only each step's inputs and computes the rest again in the backward pass. `compiled` compiles
    the drafter (once for all steps) where attention does not come in between. Nothing waits for the device.
    """
    unrolling = _Unrolling(
        drafter=drafter,
        batch=batch,
        teacher=teacher,
        settings=settings,
        layout=layout or DocumentLayout(batch, backend=backend),
        record=record,
        dtype=_compute_dtype(drafter, batch.tokens.device),
        compiled=compiled,
    )
    states = replace(
        states,
        final=states.final.to(unrolling.dtype),
        aux=None if states.aux is None else states.aux.to(unrolling.dtype),
    )
    feature = (_compiled_fuse() if compiled else _fuse)(drafter, states)
    blocks: Blocks = ()
    losses, tally, metrics = [], _Tally(batch, settings.depth), TttMetrics.zeros(settings.depth, batch.tokens.device)
    for step in range(settings.depth):
        inputs = StepInputs.of(batch, step)
        weight = settings.depth_decay**step / denominators[step].to(torch.float32).clamp(min=1)
        arguments = (inputs, weight, feature, blocks, _wanted_state(drafter, states, step))
        if checkpointing:
            outcome: StepOutcome = checkpoint(unrolling.step, *arguments, use_reentrant=False)
        else:
            outcome = unrolling.step(*arguments)
        feature, blocks = outcome.feature, outcome.blocks
        losses.append(outcome.loss)
        tally.add(inputs.taught.flatten(), outcome.correct)
        _add(metrics, step, inputs, teacher, outcome)
    metrics.tally = tally.counts()
    return TttResult(loss=torch.stack(losses).sum(), metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class _Unrolling:
    """What all steps share. `step` changes nothing, so it can be run twice."""

    drafter: Drafter
    batch: PackedBatch
    teacher: TeacherLogits
    settings: TttSettings
    layout: DocumentLayout
    record: bool
    dtype: torch.dtype
    compiled: bool

    def step(
        self, inputs: StepInputs, weight: Tensor, feature: Tensor, blocks: Blocks, wanted: Tensor | None
    ) -> StepOutcome:
        drafter, settings, taught = self.drafter, self.settings, inputs.taught.flatten()
        storage = TttStorage(self.batch, record=self.record, layout=self.layout, earlier=blocks)
        draft = _compiled_draft() if self.compiled else _draft
        # Rounded as serving rounds it. Wider, it would also make every later activation wider.
        states = draft(drafter, inputs.tokens, feature.to(self.dtype), inputs.positions, storage)
        inside = taught & self.teacher.choice_in_draft[inputs.target_rows]
        result = draft_loss(
            drafter.logits(states.head).flatten(0, 1),
            self.teacher.draft_logits,
            inputs.target_rows,
            self.teacher.log_total,
            inside * weight,
            kind=settings.loss,
            kl_weight=settings.kl_weight,
        )
        loss, feature_loss = result.total, None
        if wanted is not None:
            each = F.smooth_l1_loss(states.head.float(), wanted.float(), reduction="none").mean(-1).flatten()
            loss = loss + settings.feature_weight * (each * (taught * weight)).sum()
            feature_loss = each.detach()
        choice = drafter.to_target_ids(result.choice)
        return StepOutcome(
            feature=states.feature,
            blocks=storage.blocks,
            loss=loss,
            row_loss=result.row_loss,
            overlap=result.overlap,
            correct=inside & (choice == self.teacher.choice[inputs.target_rows]),
            feature_loss=feature_loss,
            signals=_signals(states, storage) if self.record else None,
        )


def _draft(drafter: Drafter, tokens: Tensor, feature: Tensor, positions: Tensor, storage: TttStorage) -> DraftStates:
    states: DraftStates = drafter(tokens, feature, positions, storage)
    return states


def _fuse(drafter: Drafter, states: TargetStates) -> Tensor:
    return drafter.fuse(states)


@functools.cache
def _compiled_draft() -> Any:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(_draft, dynamic=False)


@functools.cache
def _compiled_fuse() -> Any:
    return torch.compile(_fuse, dynamic=False)


def _compute_dtype(drafter: Drafter, device: torch.device) -> torch.dtype:
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return next(drafter.parameters()).dtype


def _wanted_state(drafter: Drafter, states: TargetStates, step: int) -> Tensor | None:
    """EAGLE-1 imitates the target's final state after the token that the slot reads: [rows, length, hidden]."""
    if drafter.config.architecture is not Architecture.EAGLE1:
        return None
    return shifted(states.final.detach(), step + 1, fill=0.0)


@torch.no_grad()
def _signals(states: DraftStates, storage: TttStorage) -> Signals:
    masses: list[AttentionMass] = [passes[-1] for passes in storage.masses.values()]  # one for each layer
    return Signals(
        hidden_rms=states.feature.float().square().mean(-1).sqrt(),
        head_rms=states.head.float().square().mean(-1).sqrt(),
        sink=torch.stack([mass.sink for mass in masses]).mean(0),
        own=torch.stack([mass.own for mass in masses]).mean(0),
    )


@torch.no_grad()
def _add(metrics: TttMetrics, step: int, inputs: StepInputs, teacher: TeacherLogits, outcome: StepOutcome) -> None:
    taught = inputs.taught.flatten()
    inside = teacher.choice_in_draft[inputs.target_rows]

    def total(values: Tensor) -> Tensor:
        return values.flatten().double().where(taught, 0.0).sum()

    metrics.supervised[step] = taught.sum()
    metrics.outside[step] = (taught & ~inside).sum()
    metrics.correct[step] = outcome.correct.sum()
    metrics.loss[step] = total(outcome.row_loss)
    metrics.overlap[step] = total(outcome.overlap)
    if outcome.feature_loss is not None:
        metrics.feature_loss[step] = total(outcome.feature_loss)
    if outcome.signals is not None:
        metrics.recorded[step] = taught.sum()
        metrics.hidden_rms[step] = total(outcome.signals.hidden_rms)
        metrics.head_rms[step] = total(outcome.signals.head_rms)
        metrics.own_attention[step] = total(outcome.signals.own)
        metrics.sink_attention[step] = total(outcome.signals.sink)


class _Tally:
    """Rounds as serving would have them: from each slot, drafts up to the end of what is taught there."""

    def __init__(self, batch: PackedBatch, depth: int) -> None:
        self.depth = depth
        self.drafted = torch.zeros(batch.tokens.numel(), dtype=torch.int64, device=batch.tokens.device)
        self.accepted = torch.zeros_like(self.drafted)
        self.drafting = torch.ones_like(self.drafted, dtype=torch.bool)
        self.standing = self.drafting

    def add(self, taught: Tensor, correct: Tensor) -> None:
        """Both bool [slots]. A round ends with the answer; what a slot is taught of a later one is no part of it."""
        self.drafting = self.drafting & taught
        self.standing = self.standing & self.drafting & correct
        self.drafted += self.drafting
        self.accepted += self.standing

    def counts(self) -> Tensor:
        """int64 [depth + 1, depth + 1]: rounds by drafted and accepted. Slots that draft nothing are not counted."""
        size = self.depth + 1
        counts = self.drafted.new_zeros(size * size)
        counts.scatter_add_(0, self.drafted * size + self.accepted, (self.drafted > 0).long())
        return counts.view(size, size)
