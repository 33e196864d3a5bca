"""The fused draft loss: its reference against torch and by finite differences, its kernel against the reference."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fledge.errors import ConfigError
from fledge.kernels._triton import HAS_TRITON
from fledge.kernels.draft_loss import OVERLAP_FLOOR, draft_loss
from tests.unit.kernels import draft_loss_cases as cases
from tests.unit.kernels.draft_loss_cases import KINDS, Case, draft_loss_reference, draft_loss_triton

kinds = pytest.mark.parametrize(("kind", "kl_weight"), KINDS)
interpreted = pytest.mark.skipif(
    not HAS_TRITON or torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1",
    reason="the interpreter is for machines without a GPU: see tests/gpu",
)


# The reference.


@kinds
def test_the_reference_has_the_gradient_of_its_value(kind, kl_weight):
    case = Case.random(6, 9, 11, dtype=torch.float64)
    case.weight[2] = 0.0
    logits = case.logits.clone().requires_grad_()

    def total(logits: Tensor) -> Tensor:
        return draft_loss_reference(logits, *case.rest(), kind=kind, kl_weight=kl_weight).total

    assert torch.autograd.gradcheck(total, (logits,))


def test_soft_cross_entropy_is_torchs_own():
    case = Case.random(6, 9, 37)
    logits = case.logits.clone().requires_grad_()
    ours = draft_loss(logits, *case.rest(), kind="soft_ce")
    ours.total.backward()
    torchs = case.logits.clone().requires_grad_()
    probabilities = case.target_logits[case.target_rows].softmax(-1)
    rows = F.cross_entropy(torchs, probabilities, reduction="none")
    (rows * case.weight).sum().backward()
    torch.testing.assert_close(ours.row_loss, rows)
    torch.testing.assert_close(logits.grad, torchs.grad)


def test_kl_is_torchs_own_and_zero_for_a_perfect_drafter():
    case = Case.random(6, 9, 37)
    rows = draft_loss(case.logits, *case.rest(), kind="kl").row_loss
    p = case.target_logits[case.target_rows].log_softmax(-1)
    expected = F.kl_div(case.logits.log_softmax(-1), p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(rows, expected)
    perfect = case.target_logits[case.target_rows] + 3.0
    assert draft_loss(perfect, *case.rest(), kind="kl").row_loss.abs().max() < 1e-6


def test_lk_by_hand():
    """p* = (.5, .3) of a target with .2 elsewhere, q = (.25, .75): overlap .25 + .3; only the first can still rise."""
    logits = torch.tensor([[0.25, 0.75]], dtype=torch.float64).log().requires_grad_()
    target = torch.tensor([[0.5, 0.3]], dtype=torch.float64).log() + 7.0
    row, log_total, weight = torch.tensor([0]), torch.tensor([7.0]), torch.tensor([2.0])
    result = draft_loss(logits, target, row, log_total, weight, kind="lk")
    result.total.backward()
    assert result.overlap.item() == pytest.approx(0.55)
    assert result.row_loss.item() == pytest.approx(-torch.tensor(0.55).log().item())
    rise = 0.25 * 0.75 / 0.55  # q_0 (1 - q_0) / overlap
    torch.testing.assert_close(logits.grad, torch.tensor([[-2 * rise, 2 * rise]], dtype=torch.float64))


def test_lk_counts_mass_outside_the_draft_vocabulary_against_the_drafter():
    case = Case.random(6, 9, 37)
    perfect = case.target_logits[case.target_rows]
    log_total = case.target_logits.logsumexp(-1)
    whole = draft_loss(
        perfect, case.target_logits, case.target_rows, log_total, torch.ones(len(perfect)), kind="lk", kl_weight=0.5
    )
    torch.testing.assert_close(whole.overlap, torch.ones(len(perfect)))
    assert whole.row_loss.abs().max() < 1e-5
    half = draft_loss(
        perfect, case.target_logits, case.target_rows, log_total + 0.5, torch.ones(len(perfect)), kind="lk"
    )
    torch.testing.assert_close(half.row_loss, torch.full_like(half.row_loss, 0.5))


def test_unknown_losses_are_refused():
    case = Case.random(1, 1, 3)
    with pytest.raises(ConfigError, match="use one of soft_ce, kl, lk"):
        draft_loss(case.logits, *case.rest(), kind="l2")


# The regimes, for the reference and the kernel.

implementations = pytest.mark.parametrize(
    "function", [draft_loss_reference, pytest.param(draft_loss_triton, marks=interpreted)]
)


@kinds
@implementations
def test_rows_of_weight_zero_are_not_read(function, kind, kl_weight):
    case = Case.random(5, 4, 70)
    case.weight[1] = case.weight[4] = 0.0
    case.logits[1] = float("nan")
    case.logits[4] = float("inf")
    case.target_rows[1] = 3
    case.target_rows[[0, 2, 3]] = torch.tensor([0, 1, 2])
    case.target_logits[3] = float("nan")
    result, gradient = case.run(function, kind, kl_weight)
    assert result.total.isfinite()
    for values in (result.row_loss, result.choice, result.overlap, gradient):
        assert not values[[1, 4]].any()
        assert values[[0, 2, 3]].isfinite().all()
    assert gradient[[0, 2, 3]].any(-1).all()


@kinds
@implementations
def test_minus_infinity_in_the_target_is_a_probability_of_zero(function, kind, kl_weight):
    case = Case.random(4, 4, 70)
    case.target_logits[:, 10:60] = float("-inf")
    case.target_logits[1, :69] = float("-inf")  # all on one token
    case.target_logits[2] = float("-inf")  # nothing at all
    case.target_rows = torch.arange(4)
    result, gradient = case.run(function, kind, kl_weight)
    log_q = case.logits.log_softmax(-1)
    assert gradient.isfinite().all()
    assert not gradient[2].any()
    assert result.overlap[2] == 0.0
    if kind == "lk":
        assert result.row_loss[2].item() == pytest.approx(-torch.tensor(OVERLAP_FLOOR).log().item())
    else:
        assert result.row_loss[2] == 0.0
        assert result.row_loss[1].item() == pytest.approx(-log_q[1, 69].item(), rel=1e-5)
    assert result.row_loss.isfinite().all()


@kinds
@implementations
def test_very_peaked_and_uniform_rows(function, kind, kl_weight):
    case = Case.random(6, 3, 70)
    case.target_rows = torch.tensor([0, 1, 2, 0, 1, 2])
    case.target_logits[0] = 0.0  # uniform
    case.target_logits[1] = 0.0
    case.target_logits[1, 5] = 1000.0  # certain
    case.target_log_total = case.target_logits.logsumexp(-1)
    case.logits[:] = 2.0
    case.logits[3:, 40] = 1000.0  # certain of something else
    result, gradient = case.run(function, kind, kl_weight)
    assert result.row_loss.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient.abs().max() <= case.weight.max() * (1 + kl_weight) * 1.001  # no gradient explodes, even here
    assert result.overlap[0].item() == pytest.approx(1.0, abs=1e-5)
    assert result.overlap[4].item() == 0.0
    if kind == "lk":  # an overlap of 1/70 of a drafter that is uniform where the target is certain
        pull = -70 * (1 / 70) * (1 - 1 / 70) + kl_weight * (1 / 70 - 1)
        assert gradient[1, 5].item() == pytest.approx(case.weight[1].item() * pull, rel=1e-4)


@implementations
def test_not_a_number_is_not_hidden(function):
    for spoil in ("logits", "target_logits"):
        case = Case.random(3, 3, 70)
        case.target_rows = torch.arange(3)
        getattr(case, spoil)[1, 65] = float("nan")
        result, _ = case.run(function, "soft_ce", 0.0)
        assert result.total.isnan()
        assert result.row_loss.isnan().tolist() == [False, True, False]


@implementations
def test_the_lowest_of_equals_is_the_choice(function):
    case = Case.random(4, 4, 5000)  # the kernel's second block begins at 4096
    case.logits.clamp_(max=1.0)
    case.logits[0] = 0.0
    case.logits[1, [37 + 4096, 37, 300]] = 9.0
    case.logits[2, 4999] = 9.0
    case.logits[3, [257, 256]] = 9.0
    result, _ = case.run(function, "kl", 0.0)
    assert result.choice.tolist() == [0, 37, 4999, 256]


# The kernel.


@interpreted
@kinds
def test_kernel(kind, kl_weight):
    cases.kernel_against_reference(3, 2, 1000, torch.float32, "cpu", kind, kl_weight, num_warps=1)


@interpreted
@pytest.mark.parametrize(("kind", "kl_weight"), [("soft_ce", 0.0), ("lk", 0.7)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kernel_in_sixteen_bits(dtype, kind, kl_weight):
    """Both ways to a row's gradient; what is read and written is the same for all losses."""
    cases.kernel_against_reference(3, 2, 300, dtype, "cpu", kind, kl_weight, num_warps=1)


@interpreted
@kinds
@pytest.mark.parametrize(("vocab", "num_warps"), [(1, None), (256, None), (2049, 4)])
def test_kernel_at_awkward_sizes(vocab, num_warps, kind, kl_weight):
    cases.kernel_against_reference(3, 2, vocab, torch.float32, "cpu", kind, kl_weight, num_warps=num_warps)


@interpreted
@kinds
def test_kernel_with_other_target_dtypes_and_strides(kind, kl_weight):
    cases.kernel_against_reference(3, 3, 300, torch.float32, "cpu", kind, kl_weight, target_dtype=torch.float16)
    cases.kernel_against_reference(3, 3, 300, torch.float32, "cpu", kind, kl_weight, strided=True)


@interpreted
def test_every_row_finds_its_own_teacher():
    """Permuted and repeated teachers give what a gathered copy of the target gives, to the last bit."""
    case = Case.random(6, 6, 300)
    for rows in ([3, 0, 5, 1, 4, 2], [2, 2, 2, 0, 5, 5]):
        case.target_rows = torch.tensor(rows)
        result, gradient = case.run(draft_loss_triton, "lk", 0.3)
        copied = Case(case.logits, case.target_logits[rows], torch.arange(6), case.target_log_total[rows], case.weight)
        expected, expected_gradient = copied.run(draft_loss_triton, "lk", 0.3)
        assert torch.equal(result.row_loss, expected.row_loss)
        assert torch.equal(gradient, expected_gradient)


@interpreted
def test_without_a_gradient_the_logits_stay():
    case = Case.random(3, 3, 70)
    head = nn.Linear(4, 70)
    hidden = torch.randn(3, 4)
    with torch.no_grad():
        logits = head(hidden)
        before = logits.clone()
        result = draft_loss_triton(logits, *case.rest(), kind="lk")
    assert torch.equal(logits, before)
    assert not result.total.requires_grad
    empty = draft_loss_triton(logits[:0], *Case.random(0, 3, 70).rest(), kind="lk")
    assert empty.total == 0.0
    assert empty.choice.shape == (0,)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 70, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.mix(hidden).tanh()).flatten(0, -2)


def gradients(head: Head, total: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(total, list(head.parameters())))


@interpreted
@pytest.mark.parametrize("in_place", [True, False])
def test_behind_a_linear_layer(in_place):
    """The gradient takes the logits' place only if it may, and reaches the weights scaled by what follows the loss."""
    case = Case.random(6, 6, 70)
    head, hidden = Head(), torch.randn(2, 3, 8)
    logits = head(hidden)
    before = logits.detach().clone()
    result = draft_loss_triton(logits, *case.rest(), kind="lk", kl_weight=0.2, in_place=in_place)
    assert torch.equal(logits.detach(), before) is not in_place
    expected = draft_loss_reference(head(hidden), *case.rest(), kind="lk", kl_weight=0.2)
    for ours, reference in zip(gradients(head, 0.3 * result.total), gradients(head, 0.3 * expected.total), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


@interpreted
def test_a_leaf_is_never_overwritten():
    case = Case.random(6, 6, 70)
    logits = case.logits.clone().requires_grad_()
    draft_loss_triton(logits, *case.rest(), kind="soft_ce").total.backward()
    assert torch.equal(logits, case.logits)
    assert logits.grad.any()


@interpreted
def test_misuse_of_overwritten_logits_is_an_error_not_a_wrong_gradient():
    case = Case.random(6, 6, 70)
    head, hidden = Head(), torch.randn(6, 8)
    modified = pytest.raises(RuntimeError, match="modified by an inplace operation")

    capped = 30.0 * (head(hidden) / 30.0).tanh()  # the scaling makes new memory: allowed
    draft_loss_triton(capped, *case.rest(), kind="kl").total.backward()
    capped = head(hidden).tanh()  # its backward pass needs what is overwritten
    result = draft_loss_triton(capped, *case.rest(), kind="kl")
    with modified:
        result.total.backward()

    logits = head(hidden)
    first = draft_loss_triton(logits, *case.rest(), kind="kl")
    draft_loss_triton(logits, *case.rest(), kind="kl")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.total.backward()

    result = draft_loss_triton(head(hidden), *case.rest(), kind="kl")
    (2.0 * result.total).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (2.0 * result.total).backward()


@interpreted
def test_under_checkpointing_and_torch_compile():
    case = Case.random(6, 6, 70)
    head, hidden = Head(), torch.randn(6, 8, requires_grad=True)

    def total(hidden: Tensor) -> Tensor:
        return 0.5 * draft_loss_triton(head(hidden), *case.rest(), kind="soft_ce").total

    expected = gradients(head, total(hidden))
    # The interpreter cannot be compiled, the layers around it can.
    compiled = torch.compile(total, backend="aot_eager")
    for other in (checkpoint(total, hidden, use_reentrant=False), compiled(hidden)):
        for ours, reference in zip(gradients(head, other), expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-7)
