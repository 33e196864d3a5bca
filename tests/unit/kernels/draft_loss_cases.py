"""The draft loss's kernel against its reference at given shapes, on the CPU under the interpreter and on a GPU.

Tolerances. Both sides compute in float32 from the same numbers. The kernel's sums run in another order and its exp has
a few units in the last place, and a logit's distance to the logsumexp is rounded at the size of the logits (here up to
about 30: 2e-6) before exp turns it into a relative error of q: 2e-5 relative for losses and gradients, and for sums
that cancel (KL near 0) 2e-5 absolute. In 16-bit dtypes the gradient is rounded once on both sides, and the rounding may
fall the other way: one unit of the dtype, in the interpreter four for bfloat16, where it truncates (cases.UNIT).
Where q and p* are equal to 1e-5 the two sides may see a different one as the smaller (`undecided`): such an entry of
the lk gradient may be off by weight * q / overlap, and the rest of its row by what that moves in the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.draft_loss import DraftLoss, LossKind, draft_loss
from tests.unit.kernels.cases import DTYPES, UNIT
from tests.unit.kernels.interpreter import in_plain_torch, in_triton

__all__ = ["DTYPES", "KINDS", "Case", "draft_loss_reference", "draft_loss_triton", "kernel_against_reference"]

draft_loss_triton, draft_loss_reference = in_triton(draft_loss), in_plain_torch(draft_loss)

KINDS: list[tuple[LossKind, float]] = [("soft_ce", 0.0), ("kl", 0.0), ("lk", 0.0), ("lk", 0.7)]


@dataclass
class Case:
    logits: Tensor
    target_logits: Tensor
    target_rows: Tensor
    target_log_total: Tensor
    weight: Tensor

    @classmethod
    def random(
        cls,
        rows: int,
        teachers: int,
        vocab: int,
        *,
        dtype: torch.dtype = torch.float32,
        target_dtype: torch.dtype | None = None,
        device: str = "cpu",
    ) -> Case:
        """A drafter that is like its target but not the same, and a target with some mass outside."""
        target_logits = (3.0 * torch.randn(teachers, vocab, device=device)).to(target_dtype or dtype)
        target_rows = torch.randint(teachers, (rows,), device=device)
        logits = target_logits[target_rows].float() + 2.0 * torch.randn(rows, vocab, device=device)
        outside = 0.5 * torch.rand(teachers, device=device)
        return cls(
            logits.to(dtype),
            target_logits,
            target_rows,
            target_logits.float().logsumexp(-1) + outside,
            0.1 + torch.rand(rows, device=device),
        )

    def rest(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.target_logits, self.target_rows, self.target_log_total, self.weight

    def run(
        self, function: Callable[..., DraftLoss], kind: LossKind, kl_weight: float, **options: object
    ) -> tuple[DraftLoss, Tensor]:
        """The result and the gradient of the total with respect to the logits, which are made as a layer makes them."""
        leaf = self.logits.detach().clone().requires_grad_()
        result = function(leaf + 0.0, *self.rest(), kind=kind, kl_weight=kl_weight, **options)
        (gradient,) = torch.autograd.grad(result.total, leaf)
        return result, gradient.clone()


def kernel_against_reference(
    rows: int,
    teachers: int,
    vocab: int,
    dtype: torch.dtype,
    device: str,
    kind: LossKind,
    kl_weight: float,
    *,
    target_dtype: torch.dtype | None = None,
    num_warps: int | None = None,
    strided: bool = False,
) -> None:
    case = Case.random(rows, teachers, vocab, dtype=dtype, target_dtype=target_dtype, device=device)
    case.weight[rows // 2] = 0.0
    expected, expected_gradient = case.run(draft_loss_reference, kind, kl_weight)
    if strided:  # rows with gaps between them, and columns with gaps between them
        wide = torch.zeros(teachers, 2 * vocab, dtype=case.target_logits.dtype, device=device)
        wide[:, ::2] = case.target_logits
        case.target_logits = wide[:, ::2]
        tall = torch.zeros(rows, vocab + 8, dtype=dtype, device=device)
        tall[:, :vocab] = case.logits
        leaf = tall.requires_grad_()
        actual = draft_loss_triton((leaf + 0.0)[:, :vocab], *case.rest(), kind=kind, kl_weight=kl_weight)
        gradient = torch.autograd.grad(actual.total, leaf)[0][:, :vocab]
    else:
        actual, gradient = case.run(draft_loss_triton, kind, kl_weight, num_warps=num_warps)
    assert torch.equal(actual.choice, expected.choice)
    for name in ("row_loss", "overlap", "total"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=2e-5, atol=2e-5)
    unit = 2e-5 if dtype == torch.float32 else UNIT[dtype]
    assert gradient.dtype == dtype
    # Below a millionth of the weight lie the entries whose q is the rounding error of larger ones.
    allowed = 1e-6 + unit * expected_gradient.float().abs()
    if kind == "lk":
        allowed += undecided(case, expected)
    assert ((gradient.float() - expected_gradient.float()).abs() <= allowed).all()
    assert not gradient[rows // 2].any()
    again, gradient_again = case.run(draft_loss_triton, kind, kl_weight, num_warps=num_warps)
    if not strided:
        assert torch.equal(again.row_loss, actual.row_loss)
        assert torch.equal(gradient_again, gradient)
    _, apart = case.run(draft_loss_triton, kind, kl_weight, num_warps=num_warps, in_place=False)
    assert torch.equal(apart, gradient_again)


def undecided(case: Case, expected: DraftLoss) -> Tensor:
    """How far the lk gradient of each entry may be off because q and p* are too close to say which is smaller."""
    log_q = case.logits.float().log_softmax(-1)
    log_p = case.target_logits[case.target_rows].float() - case.target_log_total[case.target_rows, None]
    tied = torch.where((log_q - log_p).abs() < 1e-5, log_q.exp(), 0.0)
    pull = (case.weight / expected.overlap).masked_fill(case.weight == 0, 0.0)
    return pull[:, None] * (tied + log_q.exp() * tied.sum(-1, keepdim=True))
