"""Which drafts are verified, and attention to them, under the interpreter."""

from unittest import mock

import pytest
import torch

from fledge.kernels._triton import HAS_TRITON
from fledge.kernels.admit import AcceptanceCoefficients, admit_drafts, survival_reference
from fledge.kernels.paged_attention import SplitLaunch
from tests.unit.kernels import admit_cases

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
MANY_SPLITS = SplitLaunch(slots=12, min_split=16, block_m=16, block_n=16, num_warps=4, num_stages=1)


@needs_triton
@pytest.mark.parametrize(
    ("batch", "depth", "admitted"), [(1, 1, 0), (1, 3, 2), (7, 3, 0), (7, 3, 10), (7, 3, 21), (13, 5, 40)]
)
def test_the_kernels_admit_what_the_reference_admits(batch: int, depth: int, admitted: int) -> None:
    """65 drafts are three chunks of those that a program compares with its own."""
    with mock.patch("fledge.kernels.admit.CHUNK", 32):
        admit_cases.admit(batch, depth, admitted, "cpu")


def test_the_likeliest_are_admitted_and_a_request_has_the_first_of_its_own() -> None:
    opened = admit_cases.opened_round(9, 3, "cpu")
    given = AcceptanceCoefficients(torch.tensor([[1.0, 0, 0, 0], [0.5, 1, 0, -1]]), torch.arange(9) % 2 == 0)
    survival = survival_reference(opened, given)
    found = admit_drafts(opened, given, 11)
    counts = found.starts.diff() - 1
    taken = torch.arange(3) < counts[:, None]
    assert counts.sum() == 11
    assert survival[taken].min() >= survival[~taken].max()
    assert torch.equal(found.drafted, torch.minimum(counts.long(), opened.drafted))
    for entry, (start, end) in enumerate(zip(found.starts.tolist(), found.starts.tolist()[1:], strict=False)):
        own = slice(entry * 4, entry * 4 + end - start)
        assert torch.equal(found.tokens[start:end], opened.tokens[own])
        assert torch.equal(found.slots[start:end], opened.slots[own])
        assert found.rows[entry].tolist() == [min(start + i, end - 1) for i in range(4)]


@needs_triton
@pytest.mark.parametrize("launch", [None, MANY_SPLITS], ids=["", "many splits"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 20, "with_sinks": True}, {"window": 20, "chunked": True}],
    ids=["", "window and sinks", "chunked"],
)
def test_attention_to_ragged_queries(options: dict[str, int], launch: SplitLaunch | None) -> None:
    chunks = [(37, 1), (0, 4), (90, 2), (5, 1)]
    admit_cases.ragged_attention(chunks, 6, 2, 24, torch.float32, "cpu", launch=launch, **options)
