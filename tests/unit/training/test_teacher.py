"""The target's distributions, some rows at a time."""

import pytest
import torch

from fledge.models.drafter.base import DraftVocabulary
from fledge.training import ttt
from fledge.training.ttt import Teacher

VOCAB, HIDDEN = 37, 16


@pytest.mark.parametrize("chunk_rows", [1, 4, 5, 1000])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_make_no_difference(
    chunk_rows: int, reduced: bool, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttt, "CHUNK_ROWS", chunk_rows)
    torch.manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN).to(dtype)
    head_bias = torch.randn(VOCAB).to(dtype) if bias else None
    ids = torch.tensor([0, 3, 4, 9, 20, 36])
    vocabulary = DraftVocabulary.from_target_ids(ids, VOCAB) if reduced else None
    final = torch.randn(2, 5, HIDDEN).to(dtype)
    taught = Teacher(weight, vocabulary, head_bias=head_bias)(final)
    logits = torch.nn.functional.linear(final.flatten(0, 1), weight, head_bias)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    expected = logits[:, ids] if reduced else logits
    torch.testing.assert_close(taught.draft_logits, expected, **tolerance)
    torch.testing.assert_close(taught.log_total, logits.float().logsumexp(-1), **tolerance)
    assert taught.log_total.dtype == torch.float32
    assert torch.equal(taught.choice, logits.argmax(-1))
    inside = torch.tensor([choice in ids for choice in taught.choice.tolist()]) if reduced else torch.ones(10).bool()
    assert torch.equal(taught.choice_in_draft, inside)


def test_nothing_learns_through_the_teacher_and_autocast_does_not_reach_it() -> None:
    torch.manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    final = torch.randn(1, 3, HIDDEN, requires_grad=True)
    plain = Teacher(weight, None)(final)
    assert not plain.draft_logits.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(Teacher(weight, None)(final).draft_logits, plain.draft_logits)


def test_states_in_another_dtype_than_the_head() -> None:
    torch.manual_seed(0)
    weight, final = torch.randn(VOCAB, HIDDEN), torch.randn(1, 3, HIDDEN).bfloat16()
    assert Teacher(weight, None)(final).draft_logits.dtype == torch.float32
