"""Training-time test on a GPU: flex attention against plain torch, compiled against eager. Also runs as a script.

PYTHONPATH=src:. python tests/gpu/test_training.py
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fledge.kernels.draft_loss import LossKind
from fledge.layers.attention import AttentionSpec
from fledge.layers.config import LayerConfig, RopeConfig
from fledge.models.config import TargetConfig
from fledge.models.drafter.base import Drafter, DraftVocabulary
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3_1, build
from fledge.models.target.decoder import TargetModel, TargetStates
from fledge.training.attention import Backend, DocumentLayout, TttStorage
from fledge.training.data.examples import PackedBatch
from fledge.training.recipe import FitSection
from fledge.training.ttt import Teacher, TeacherLogits, TttModel, TttOutputs
from tests.gpu.script import run_checks
from tests.unit.training.ttt_cases import Document, pack

GPU = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
LENGTH = 450  # no whole number of mask blocks
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def batch(vocab_size: int = 40) -> PackedBatch:
    d = Document
    rows = [
        [d(length=LENGTH, answer_from=20)],
        [d(length=128, answer_from=5), d(length=1, answer_from=0), d(length=200, answer_from=100)],
        [d(length=30, answer_from=3)] * 12,
    ]
    return pack(rows, LENGTH, vocab_size=vocab_size).to(GPU)


@dataclass(frozen=True)
class FinishedHeads:
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def attention_agrees(
    heads: int, kv_heads: int, head_dim: int, passes: int, dtype: torch.dtype, window: int | None = None
) -> None:
    """Outputs, recorded mass and gradients of flex attention, against float32 in plain torch.

    bfloat16 rounds outputs (2^-8) and, inside flex attention, probabilities before their products.
    """
    packed = batch()
    spec = AttentionSpec(layer=0, scale=head_dim**-0.5, sliding_window=window)
    shape = (packed.rows, packed.length)
    given = [
        [torch.randn(*shape, n, head_dim, device=GPU, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
        for _ in range(passes)
    ]
    cotangents = [torch.randn(*shape, heads, head_dim, device=GPU) for _ in range(passes)]

    def run(backend: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], TttStorage]:
        leaves = [[x.to(dtype).requires_grad_() for x in one] for one in given]
        storage = TttStorage(DocumentLayout(packed, backend=backend), record=True)
        outputs = [storage.attend(FinishedHeads(*one), spec) for one in leaves]
        loss = sum((out.float() * cotangent).sum() for out, cotangent in zip(outputs, cotangents, strict=True))
        return outputs, list(torch.autograd.grad(loss, [x for one in leaves for x in one])), storage

    flex_out, flex_grads, flex = run("flex", dtype)
    out, grads, reference = run("reference", FP32)
    rough = 2e-2 if dtype == BF16 else 5e-3  # float32 products in TF32 where the GPU is allowed to
    for mine, right in zip(flex_out + flex_grads, out + grads, strict=True):
        assert mine.isfinite().all()
        error = (mine.float() - right).norm() / right.norm()
        assert error < rough, f"relative error {error:.2e}"
    for mine, right in zip(flex.masses[0], reference.masses[0], strict=True):
        torch.testing.assert_close(mine.sink, right.sink, rtol=rough, atol=rough)
        torch.testing.assert_close(mine.own, right.own, rtol=rough, atol=rough)


@check
def flex_attention_bf16_gqa() -> None:
    attention_agrees(8, 2, 64, passes=8, dtype=BF16)


@check
def flex_attention_float32() -> None:
    attention_agrees(4, 4, 32, passes=3, dtype=FP32)


@check
def flex_attention_odd_shapes() -> None:
    attention_agrees(6, 2, 96, passes=2, dtype=BF16)  # neither group nor head_dim a power of two


@check
def flex_attention_sliding_window() -> None:
    attention_agrees(8, 2, 64, passes=1, dtype=BF16, window=100)


def target(dtype: torch.dtype) -> TargetModel:
    layer = LayerConfig(
        hidden_size=256,
        intermediate_size=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        norm_eps=1e-5,
        rope=RopeConfig(),
    )
    config = TargetConfig(
        family="llama", layer=layer, num_layers=6, vocab_size=1000, max_positions=1024, tied_head=False
    )
    torch.manual_seed(1)
    return TargetModel(config).to(GPU, dtype).requires_grad_(False)


@dataclass(frozen=True)
class Scene:
    drafter: Drafter
    packed: PackedBatch
    states: TargetStates
    teacher: TeacherLogits

    def run(
        self,
        backend: Backend = "auto",
        loss: LossKind = "soft_ce",
        *,
        compiled: bool = False,
        checkpointing: bool = False,
        record: bool = False,
    ) -> tuple[TttOutputs, list[Tensor]]:
        fit = FitSection(
            depth=7, loss=loss, compile="on" if compiled else "off", activation_checkpointing=checkpointing
        )
        counts = self.packed.supervised_counts(fit.depth)
        with torch.autocast("cuda", dtype=BF16):
            result = TttModel(self.drafter, fit, backend=backend)(
                self.packed, self.states, self.teacher, counts, record
            )
        own = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        return result, list(torch.autograd.grad(result.loss, own))


def scene(eagle1: bool = False) -> Scene:
    model = target(BF16)
    config = EAGLE_1.config_for(model.config) if eagle1 else EAGLE_3_1.config_for(model.config)
    if not eagle1:
        config = replace(config, draft_vocab_size=600)
    torch.manual_seed(2)
    drafter = build(config).to(GPU)
    if drafter.vocabulary is not None:
        ids = torch.randperm(1000)[:600].sort().values
        drafter.vocabulary = DraftVocabulary.from_target_ids(ids, 1000).to(GPU)
    drafter.share_with(model)
    packed = batch(1000)
    with torch.no_grad():
        states = model(
            packed.tokens, packed.positions, TttStorage(DocumentLayout(packed), keep=False), drafter.aux_layer_ids
        )
    return Scene(drafter, packed, states, Teacher(model.lm_head.weight, drafter.vocabulary)(states.final))


def agree(mine: tuple[TttOutputs, list[Tensor]], right: tuple[TttOutputs, list[Tensor]]) -> None:
    """Both in bfloat16: gradients differ by rounding (2^-8) that seven steps carry on, losses hardly."""
    torch.testing.assert_close(mine[0].loss, right[0].loss, rtol=2e-3, atol=0)
    for grad, expected in zip(mine[1], right[1], strict=True):
        assert grad.isfinite().all()
        error = (grad - expected).norm() / expected.norm()
        assert error < 5e-2, f"relative error of a gradient {error:.2e}"
    a, b = mine[0].metrics, right[0].metrics
    assert torch.equal(a.supervised, b.supervised)
    assert torch.equal(a.outside, b.outside)
    torch.testing.assert_close(a.loss, b.loss, rtol=5e-3, atol=0)
    assert ((a.correct - b.correct).abs() <= 2 + a.supervised // 50).all()


@check
def target_pass_flex_and_reference() -> None:
    model, packed = target(BF16), batch(1000)
    with torch.no_grad():
        mine, right = (
            model(
                packed.tokens, packed.positions, TttStorage(DocumentLayout(packed, backend=backend), keep=False), (2,)
            )
            for backend in ("flex", "reference")
        )
    assert (mine.final - right.final).float().norm() / right.final.float().norm() < 2e-2


@check
def unrolled_flex_and_reference() -> None:
    one = scene()
    right = one.run("reference", record=True)
    mine = one.run("flex", record=True)
    agree(mine, right)
    mine_report, right_report = mine[0].metrics.report(), right[0].metrics.report()
    for name in ("own_attention_by_depth", "sink_attention_by_depth", "hidden_rms_by_depth"):
        torch.testing.assert_close(
            torch.tensor(mine_report[name]), torch.tensor(right_report[name]), rtol=2e-2, atol=1e-3
        )


@check
def unrolled_compiled_and_eager() -> None:
    one = scene()
    eager = one.run()
    agree(one.run(compiled=True), eager)
    agree(one.run(compiled=True, checkpointing=True), eager)
    agree(one.run(checkpointing=True), eager)


@check
def unrolled_eagle1_and_lk() -> None:
    one = scene(eagle1=True)
    agree(one.run("flex", compiled=True), one.run("reference"))
    two = scene()
    agree(two.run("flex", "lk"), two.run("reference", "lk"))


@check
def unrolling_never_waits_for_the_device() -> None:
    one = scene()
    one.run(compiled=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one.run(compiled=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


if "pytest" in sys.modules:
    import pytest

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("name", CHECKS)
    def test_training(name: str) -> None:
        torch.manual_seed(0)
        CHECKS[name]()


if __name__ == "__main__":
    sys.exit(run_checks(CHECKS, sys.argv[1:]))
