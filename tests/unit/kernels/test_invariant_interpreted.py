"""The kernels of the batch-invariant mode on the CPU, under Triton's interpreter: bit for bit, at every boundary."""

import os
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is for machines without a GPU: see tests/gpu", allow_module_level=True)

from fledge.engine import invariance
from fledge.kernels import invariant_attention, invariant_linear
from fledge.kernels import quantized_linear as multiplying
from fledge.layers.quantized import QuantizedLinear
from tests.tiny_models import TINY_TARGET, make_target
from tests.unit.kernels import invariant_cases as cases
from tests.unit.kernels import quantized_cases
from tests.unit.kernels.interpreter import in_triton

CPU, FP16 = "cpu", torch.float16


@pytest.fixture(autouse=True)
def _small():
    """A few dozen keys are several pieces, and a piece two steps."""
    with (
        cases.stepwise_products(),
        mock.patch.object(invariant_linear, "has_room", return_value=True),
        mock.patch.object(invariant_attention, "PIECE", 32),
        mock.patch.object(invariant_attention, "step_keys", return_value=16),
    ):
        yield


# With 4 multiprocessors: four chains of steps of 64 and of 128, one chain in blocks of 64; rows no whole steps long.
@pytest.mark.parametrize(("columns", "size"), [(70, 512), (130, 512), (170, 512), (33, 200)])
def test_a_row_of_a_linear_has_the_same_bits_among_any_number(columns, size):
    cases.linear(columns, size, FP16, CPU, (1, 17, 65))


@pytest.mark.parametrize(("kind", "group", "with_zeros"), quantized_cases.KINDS)
def test_a_row_of_a_quantised_linear_has_the_same_bits_among_any_number(kind, group, with_zeros):
    """As stored, which is dequantised for it: kernels that read fragments do not run under the interpreter."""
    with mock.patch.object(multiplying, "_PIECE_BYTES", 1):  # several pieces of W
        weight = quantized_cases.quantized(kind, 270, 512, group, with_zeros=with_zeros, device="cpu")
        assert not weight.in_fragments
        cases.quantized_linear([weight, quantized_cases.shuffled(weight)], FP16, CPU, (1, 17, 65))


def test_so_it_has_of_rows_in_eight_bits():
    weights = [
        quantized_cases.quantized("fp8", 36, 200, None, with_zeros=False, device="cpu", activations=activations)
        for activations in ("token", "tensor")
    ]
    cases.quantized_linear(weights, FP16, CPU, (1, 17, 65))
    with (
        mock.patch.object(multiplying, "invariant_linear", _of_many_in_another_order),
        pytest.raises(AssertionError, match="numbers differ"),
    ):
        cases.quantized_linear(weights, FP16, CPU, (1, 17, 65))


def _of_many_in_another_order(x, weight, bias):
    linear = invariant_linear.invariant_linear
    if len(x) <= 16:
        return linear(x, weight, bias)
    return linear(x[:, :104], weight[:, :104].contiguous(), bias) + linear(x[:, 104:], weight[:, 104:].contiguous())


@pytest.mark.parametrize(
    ("lengths", "counts", "settings"),
    [([70, 35], (1, 5), {}), ([50], (5,), {"sliding_window": 20})],
    ids=("all", "window"),
)
def test_a_query_has_the_same_bits_in_prompts_chains_and_batches(lengths, counts, settings):
    settings["sinks"] = torch.randn(2, dtype=FP16)
    cases.attention(lengths, 2, 1, 16, FP16, CPU, block_size=16, cuts=(31,), counts=counts, ends=(33,), **settings)


def test_a_path_of_a_tree_has_the_bits_of_a_chain():
    cases.tree_attention(27, 9, 4, 2, 16, FP16, CPU, block_size=16)


@torch.no_grad()
def test_an_engine_tries_a_row_alone_and_among_others_as_it_starts():
    target = make_target(TINY_TARGET).half()
    assert invariance.differing(target) is None
    rounded = mock.Mock(side_effect=lambda x, weight, _=None: torch.nn.functional.linear(x, weight) + x.shape[0] * 1e-3)
    with mock.patch.object(invariance, "invariant_linear", rounded):
        assert invariance.differing(target) == "a row of a product"
    for activations in (None, "token"):
        weight = quantized_cases.quantized("fp8", 40, 32, None, with_zeros=False, device=CPU, activations=activations)
        target.own = QuantizedLinear(weight, None, FP16)
        differing = in_triton(invariance.differing)
        assert differing(target) is None
        with mock.patch.object(multiplying, "invariant_linear", rounded):
            assert differing(target) == "a row of a product"
    attended = mock.Mock(side_effect=lambda query, *_, **__: query + query.shape[0] * 1e-3)
    with mock.patch.object(invariant_attention, "invariant_attention", attended):
        assert invariance.differing(target) == "a query"
