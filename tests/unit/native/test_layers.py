"""The C kernels against the torch references, and a row's bits against its own in other company.

Both sides compute in float32 and differ in the order of sums and in the last bits of exp: 1e-5 of the numbers' size
for one operation, a little more after some layers of them.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.layers.block import DecoderLayer
from fledge.layers.config import ExpertsConfig, RopeConfig
from fledge.layers.rope import Rotation
from fledge.native import team
from fledge.native.decoder import lower_layers
from fledge.native.library import library
from fledge.native.linear import pack_linears, packed_linear
from tests.tiny_models import TINY_LAYER
from tests.unit.native.native_cases import SHAPES, make_case, pack, with_own_cache

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler here")


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(team, "MAX_WAIT", math.inf)  # so many, however busy the machine is
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@given(
    rows=st.integers(0, 30),
    columns=st.integers(1, 40).map(lambda n: 2 * n),
    size=st.integers(1, 70),
    is_bfloat16=st.booleans(),
    paired=st.booleans(),
    has_bias=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_a_packed_matrix_multiplies_like_any(rows, columns, size, is_bfloat16, paired, has_bias) -> None:
    weight, bias = torch.randn(columns, size), torch.randn(columns) if has_bias else None
    if is_bfloat16:
        weight = weight.bfloat16().float()
    x = torch.randn(rows, size)
    packed = pack(weight, bias, paired=paired)
    assert packed is not None
    assert packed.held["panels"].element_size() == (2 if is_bfloat16 else 4)
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(packed_linear(x, packed), expected, rtol=1e-5, atol=1e-5 * size**0.5)


@pytest.mark.parametrize("is_bfloat16", [True, False])
@pytest.mark.usefixtures("threads")
def test_a_row_of_a_product_is_the_same_bits_in_any_company(is_bfloat16: bool) -> None:
    weight = torch.randn(100, 48)
    packed = pack(weight.bfloat16().float() if is_bfloat16 else weight, None)
    assert packed is not None
    x = torch.randn(3, 20, 48)
    together = packed_linear(x, packed)
    torch.set_num_threads(1)
    for i in range(3):
        for j in range(20):
            assert torch.equal(packed_linear(x[i, j], packed), together[i, j])


def test_other_dtypes_are_left_to_torch() -> None:
    assert pack(torch.randn(32, 32).bfloat16(), None) is None
    assert pack(torch.randn(32, 32), torch.randn(32).half()) is None


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.usefixtures("threads")
def test_rounds_are_those_of_torch(name: str, rows: int) -> None:
    make_case(SHAPES[name], [0, 37, 5, 90], [rows] * 4).check(aux_layer_ids=(1, 0, SHAPES[name].layers))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("threads")
def test_trees_are_those_of_torch(name: str) -> None:
    make_case(SHAPES[name], [30, 0, 3], [9] * 3, tree=True).check()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("threads")
def test_chunks_are_those_of_torch(name: str) -> None:
    make_case(SHAPES[name], [0, 11, 64], [50, 1, 23], chunks=True).check()


@pytest.mark.usefixtures("threads")
def test_rows_of_nobody_are_neither_kept_nor_mixed() -> None:
    make_case(SHAPES["plain"], [7, -5, 20], [3] * 3).check()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("threads")
def test_a_token_is_the_same_bits_decoded_alone_verified_or_read_in_a_prompt(name: str) -> None:
    """What makes speculation lossless beyond rounding: 6 tokens at once, in two parts, and one by one."""
    case = make_case(SHAPES[name], [13, 29], [6, 6])
    together, _, filled = case.natively()
    torch.set_num_threads(1)
    for cuts in ([0, 6], [0, 4, 6], range(7)):
        storage = with_own_cache(case.storage)
        for start, stop in pairwise(cuts):
            for sequence in range(2):
                own = slice(sequence * 6 + start, sequence * 6 + stop)
                turned = case.rotation
                part = replace(
                    case,
                    storage=replace(
                        storage,
                        context_lens=storage.context_lens[sequence : sequence + 1] + start,
                        block_tables=storage.block_tables[sequence : sequence + 1],
                        slots=storage.slots[own],
                        rows=stop - start,
                    ),
                    rotation=Rotation(
                        turned.positions[own], turned.inverse_frequencies, turned.magnitude, turned.dtype
                    ),
                    stream=case.stream[own],
                    first_input=None if case.first_input is None else case.first_input[own],
                )
                final, _, after = part.natively()
                assert torch.equal(final, together[own])
                storage.cache.keys.copy_(after.keys)
                storage.cache.values.copy_(after.values)
        assert torch.equal(storage.cache.keys, filled.keys)
        assert torch.equal(storage.cache.values, filled.values)


def test_what_is_not_a_number_stays_so_and_stays_where_it_is() -> None:
    case = make_case(SHAPES["plain"], [7, 8], [2, 2])
    case.stream[2, 5] = float("nan")
    final, _, _ = case.natively()
    assert final[:2].isfinite().all()
    assert final[2].isnan().any()


@pytest.mark.parametrize(
    "kind",
    [
        {"norm_placement": "post"},
        {"norm_placement": "both"},
        {"norm_offset": True},
        {"activation": "gelu_pytorch_tanh"},
        {"sinks": True},
        {"rope": RopeConfig(interleaved=True)},
        {"qk_norm": True, "qk_norm_whole": True},
        {"experts": ExpertsConfig(num_experts=4, num_experts_per_token=2, intermediate_size=8)},
    ],
)
def test_layers_of_another_kind_are_left_to_torch(kind: dict[str, object]) -> None:
    plain, other = (DecoderLayer(config, layer=0) for config in (TINY_LAYER, replace(TINY_LAYER, **kind)))
    assert lower_layers([plain]) is None  # not packed yet
    pack_linears(plain, other)
    assert lower_layers([plain]) is not None
    assert lower_layers([plain, other]) is None


def test_a_layer_of_somebodys_own_is_left_to_torch() -> None:
    class Own(DecoderLayer):
        pass

    own = Own(TINY_LAYER, layer=0)
    pack_linears(own)
    assert lower_layers([own]) is None
