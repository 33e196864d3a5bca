"""The small C kernels of a round against the torch references: integers exactly, norms to the last bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.kernels import round_rows
from fledge.kernels.accept import accept_chain, accept_chain_reference, accept_greedy
from fledge.kernels.argmax import argmax_rows_reference
from fledge.kernels.draft_input import draft_input_reference
from fledge.kernels.native.library import library
from fledge.kernels.native.rows import (
    add_rms_norm_native,
    argmax_rows_native,
    draft_input_native,
    rms_norm_native,
    runs_native,
)
from fledge.kernels.rms_norm import add_rms_norm_reference, rms_norm_parts, rms_norm_reference

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler here")
EPS = 1e-6


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 320), (3, 5, 64), (7, 21), (0, 16), (8,)])
def test_norms(shape: tuple[int, ...]) -> None:
    x, residual, weight = torch.randn(shape) * 3, torch.randn(shape), torch.randn(shape[-1])
    close(rms_norm_native(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    found, expected = add_rms_norm_native(x, residual, weight, EPS), add_rms_norm_reference(x, residual, weight, EPS)
    close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_norms_of_parts_and_of_rows_apart_from_each_other() -> None:
    x, weights = torch.randn(5, 70)[:, :60], [torch.randn(20) for _ in range(3)]
    parts = [rms_norm_reference(part, w, EPS) for part, w in zip(x.split(20, dim=-1), weights, strict=True)]
    assert runs_native(x, *weights)
    close(rms_norm_parts(x, weights, EPS), torch.cat(parts, dim=-1))


@pytest.mark.parametrize(("rows", "size"), [(1, 320), (5, 21), (0, 8)])
def test_what_a_drafter_reads(rows: int, size: int) -> None:
    tokens, embedding = torch.randint(0, 50, (rows,)), torch.randn(50, size)
    given_ = tokens, embedding, torch.randn(rows, 2 * size)[:, :size], torch.randn(size), torch.randn(size), EPS
    close(draft_input_native(*given_), draft_input_reference(*given_))


@given(rows=st.integers(0, 9), vocab=st.integers(1, 70), values=st.integers(1, 100), has_offsets=st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_first_of_the_largest(rows: int, vocab: int, values: int, has_offsets: bool) -> None:
    logits = torch.randint(-values, values, (rows, vocab)).float()  # few values: many are equal
    logits[torch.rand(rows, vocab) < 0.1] = -torch.inf
    logits[torch.rand(rows, vocab) < 0.01] = torch.nan
    offsets = torch.randint(0, 1000, (vocab,)) if has_offsets else None
    assert torch.equal(argmax_rows_native(logits, offsets), argmax_rows_reference(logits, offsets))


def test_the_first_of_rows_of_nothing() -> None:
    for value in (-torch.inf, torch.inf, torch.nan):
        assert argmax_rows_native(torch.full((2, 40), value)).tolist() == [0, 0]


@given(batch=st.integers(0, 5), depth=st.integers(0, 6), has_lengths=st.booleans())
@settings(max_examples=60, deadline=None)
def test_which_drafts_stand(batch: int, depth: int, has_lengths: bool) -> None:
    drafts, choices = torch.randint(0, 2, (batch, depth + 3))[:, :depth], torch.randint(0, 2, (batch, depth + 1))
    lengths = torch.randint(0, depth + 3, (batch,)) if has_lengths else None
    logits = torch.nn.functional.one_hot(choices, 5).float()
    expected = accept_chain_reference(drafts, choices, draft_lengths=lengths)
    for found in (
        accept_chain(drafts, choices, draft_lengths=lengths),
        accept_greedy(drafts, logits, draft_lengths=lengths),
    ):
        for name in ("tokens", "accepted", "last"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(("batch", "verify", "depth"), [(1, 0, 0), (1, 3, 3), (5, 3, 1), (7, 5, 8), (3, 0, 4)])
def test_both_ends_of_a_round(batch: int, verify: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, blocks, block_size = 9, 30, 4
    before = {
        "last_token": torch.randint(100, (requests,)),
        "drafts": torch.randint(100, (requests, 8)),
        "length": torch.randint(0, blocks * block_size, (requests,)),
        "draft_count": torch.randint(0, 9, (requests,)),
        "block_tables": torch.randint(1, 500, (requests, blocks), dtype=torch.int32),
    }
    limits = {"draft_until": torch.randint(0, 120, (requests,)), "draft_limit": torch.randint(0, 10, (requests,))}
    rows, accepted = torch.randperm(requests)[:batch], torch.randint(0, verify + 1, (batch,))
    emitted = torch.randint(0, 100, (batch, verify + 1))
    emitted[torch.arange(verify + 1) > accepted[:, None]] = -1
    results = []
    for native in (False, True):
        monkeypatch.setattr(round_rows, "runs_native", lambda *_, use=native: use)
        now = {name: tensor.clone() for name, tensor in before.items()}
        opened = round_rows.open_round(rows, **now, verify=verify, block_size=block_size)
        state = {name: now[name] for name in ("last_token", "length", "draft_count")}
        settled = round_rows.settle_round(
            rows, opened, emitted, accepted, **state, **limits, depth=depth, block_size=block_size
        )
        places = vars(settled.places)
        results.append({**now, **vars(opened), **{f"settled {k}": v for k, v in vars(settled).items()}, **places})
    for name, expected in results[0].items():
        if isinstance(expected, Tensor):
            assert torch.equal(results[1][name], expected), name


def test_what_the_library_does_not_take() -> None:
    x = torch.randn(4, 8)
    assert runs_native(x)
    assert not runs_native(x.half())
    assert not runs_native(x.T)
    assert not runs_native(x, x.clone().requires_grad_())
    with torch.no_grad():
        assert runs_native(x.clone().requires_grad_())
