"""The bookkeeping kernels under the interpreter: integers, so equal to the reference to the last bit."""

from types import SimpleNamespace

import pytest
import torch

from fledge.kernels._triton import HAS_TRITON
from fledge.kernels.round_ends import OpenedRound, open_round, settle_round
from tests.unit.kernels.interpreter import in_plain_torch, in_triton

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

BLOCK_SIZE = 4


def state(requests: int, max_depth: int, max_blocks: int) -> dict[str, torch.Tensor]:
    return {
        "last_token": torch.randint(100, (requests,)),
        "drafts": torch.randint(100, (requests, max_depth)),
        "confidence": torch.rand(requests, max_depth),
        "length": torch.randint(0, (max_blocks - 6) * BLOCK_SIZE, (requests,)),
        "draft_count": torch.randint(0, max_depth + 1, (requests,)),
        "block_tables": torch.randint(1, 500, (requests, max_blocks), dtype=torch.int32),
    }


def same_opening(found: OpenedRound, expected: OpenedRound) -> None:
    for name in ("tokens", "positions", "slots", "context", "drafted", "confidence"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for row, context in enumerate(expected.context.tolist()):
        used = context // BLOCK_SIZE + 1
        assert torch.equal(found.tables[row, :used], expected.tables[row, :used])


@pytest.mark.parametrize(("batch", "verify", "depth"), [(1, 0, 0), (1, 3, 3), (5, 3, 1), (7, 5, 8), (3, 0, 4)])
def test_both_ends_of_a_round(batch: int, verify: int, depth: int) -> None:
    requests, max_depth, max_blocks = 9, 8, 300
    before = state(requests, max_depth, max_blocks)
    until = torch.randint(0, max_blocks * BLOCK_SIZE, (requests,))
    limit = torch.randint(0, max_depth + 2, (requests,))
    rows = torch.randperm(requests)[:batch]
    accepted = torch.randint(0, verify + 1, (batch,))
    emitted = torch.randint(0, 100, (batch, verify + 1))
    emitted[torch.arange(verify + 1) > accepted[:, None]] = -1
    results = []
    for run in (in_plain_torch, in_triton):
        now = {name: tensor.clone() for name, tensor in before.items()}
        held = SimpleNamespace(**now, draft_until=until, draft_limit=limit, block_size=BLOCK_SIZE, lookahead=0)
        opened = run(open_round)(rows, held, verify)
        settled = run(settle_round)(rows, held, opened, emitted, accepted, depth)
        results.append((opened, settled, now))
    (opened, settled, now), (found_opened, found_settled, found_now) = results
    same_opening(found_opened, opened)
    assert all(torch.equal(found_now[name], now[name]) for name in now)
    assert torch.equal(found_settled.tokens, settled.tokens)
    assert torch.equal(found_settled.last_rows, settled.last_rows)
    assert torch.equal(found_settled.places.positions, settled.places.positions)
    assert torch.equal(found_settled.places.slots, settled.places.slots)
