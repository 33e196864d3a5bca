"""The small C kernels of a round against the torch references: equal to the last bit."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.kernels._triton import cpu_kernel, register_cpu_kernels
from fledge.kernels.accept import accept_chain, accept_chain_reference, accept_greedy
from fledge.kernels.argmax import argmax_rows, argmax_rows_reference, argmax_with_probability, largest_probability
from fledge.kernels.round_ends import open_round, settle_round
from fledge.native import kernels_of
from fledge.native.library import library, required
from tests.unit.kernels import tree_cases

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler here")


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    register_cpu_kernels(kernels_of(required()))
    yield
    register_cpu_kernels({})


@pytest.mark.usefixtures("registered")
@given(rows=st.integers(0, 9), vocab=st.integers(1, 70), values=st.integers(1, 100), has_offsets=st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_first_of_the_largest(rows: int, vocab: int, values: int, has_offsets: bool) -> None:
    logits = torch.randint(-values, values, (rows, vocab)).float()  # few values: many are equal
    logits[torch.rand(rows, vocab) < 0.1] = -torch.inf
    logits[torch.rand(rows, vocab) < 0.01] = torch.nan
    offsets = torch.randint(0, 1000, (vocab,)) if has_offsets else None
    assert cpu_kernel("argmax_rows", logits, offsets) is not None
    assert torch.equal(argmax_rows(logits, offsets), argmax_rows_reference(logits, offsets))
    chosen, confidence = argmax_with_probability(logits, offsets)
    assert torch.equal(chosen, argmax_rows_reference(logits, offsets))
    torch.testing.assert_close(confidence, largest_probability(logits), equal_nan=True)


@pytest.mark.usefixtures("registered")
def test_the_first_of_rows_of_nothing() -> None:
    for value in (-torch.inf, torch.inf, torch.nan):
        assert argmax_rows(torch.full((2, 40), value)).tolist() == [0, 0]


@pytest.mark.usefixtures("registered")
@given(batch=st.integers(0, 5), depth=st.integers(0, 6), has_lengths=st.booleans())
@settings(max_examples=60, deadline=None)
def test_which_drafts_stand(batch: int, depth: int, has_lengths: bool) -> None:
    drafts, choices = torch.randint(0, 2, (batch, depth + 3))[:, :depth], torch.randint(0, 2, (batch, depth + 1))
    lengths = torch.randint(0, depth + 3, (batch,)) if has_lengths else None
    logits = torch.nn.functional.one_hot(choices, 5).float()
    expected = accept_chain_reference(drafts, choices, draft_lengths=lengths)
    for found in (
        accept_chain(drafts, choices, draft_lengths=lengths),
        accept_chain(drafts, argmax_rows(logits), draft_lengths=lengths),
        accept_greedy(drafts, logits, draft_lengths=lengths),
    ):
        for name in ("tokens", "accepted"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(("batch", "verify", "depth"), [(1, 0, 0), (1, 3, 3), (5, 3, 1), (7, 5, 8), (3, 0, 4)])
@pytest.mark.usefixtures("registered")
def test_both_ends_of_a_round(batch: int, verify: int, depth: int) -> None:
    requests, blocks, block_size = 9, 30, 4
    before = {
        "last_token": torch.randint(100, (requests,)),
        "drafts": torch.randint(100, (requests, 8)),
        "confidence": torch.rand(requests, 8),
        "length": torch.randint(0, blocks * block_size, (requests,)),
        "draft_count": torch.randint(0, 9, (requests,)),
        "block_tables": torch.randint(1, 500, (requests, blocks), dtype=torch.int32),
    }
    limits = {"draft_until": torch.randint(0, 120, (requests,)), "draft_limit": torch.randint(0, 10, (requests,))}
    rows, accepted = torch.randperm(requests)[:batch], torch.randint(0, verify + 1, (batch,))
    emitted = torch.randint(0, 100, (batch, verify + 1))
    emitted[torch.arange(verify + 1) > accepted[:, None]] = -1
    results = []
    for kernels in ({}, kernels_of(required())):
        register_cpu_kernels(kernels)
        now = {name: tensor.clone() for name, tensor in before.items()}
        state = SimpleNamespace(**now, **limits, block_size=block_size, lookahead=0)
        opened = open_round(rows, state, verify)
        settled = settle_round(rows, state, opened, emitted, accepted, depth)
        parts = {"opened": opened, "settled": settled, "places": settled.places}
        made = {f"{part} {k}": v for part, found in parts.items() for k, v in found._asdict().items()}
        results.append(now | made)
    for name, expected in results[0].items():
        if isinstance(expected, Tensor):
            assert torch.equal(results[1][name], expected), name


@pytest.mark.usefixtures("registered")
def test_what_the_library_does_not_take() -> None:
    x = torch.randn(4, 8)
    assert cpu_kernel("argmax_rows", x) is not None
    assert cpu_kernel("something_else", x) is None
    assert cpu_kernel("argmax_rows", x.half()) is None
    assert cpu_kernel("argmax_rows", x.T) is None
    assert cpu_kernel("argmax_rows", x, x.clone().requires_grad_()) is None
    with torch.no_grad():
        assert cpu_kernel("argmax_rows", x.clone().requires_grad_()) is not None
    assert torch.equal(argmax_rows(x.half()), x.half().argmax(-1))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("rows", "vocab", "count"), [(4, 9, 9), (5, 1024, 8), (4, 4200, 20)])
def test_the_best_few(rows: int, vocab: int, count: int) -> None:
    assert cpu_kernel("first_largest", torch.zeros(1)) is not None
    tree_cases.top_rows(rows, vocab, count, torch.float32, "cpu", run=lambda function: function)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("width", "budget", "depth", "vocab"),
    [(3, 9, 3, 20), (8, 32, 5, 40), (4, 63, 6, 3), (5, 2, 5, 11), (64, 63, 2, 99)],
)
def test_trees(width: int, budget: int, depth: int, vocab: int) -> None:
    assert cpu_kernel("grow_trees", torch.zeros(1)) is not None
    tree_cases.trees(width, budget, depth, vocab, "cpu", run=lambda function: function)
