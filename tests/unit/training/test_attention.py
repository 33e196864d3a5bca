"""Attention of training-time test against masks written out in full."""

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from fledge.layers.attention import AttentionSpec
from fledge.training import attention
from fledge.training.attention import MASK_BLOCK, DocumentLayout, TttStorage
from fledge.training.data.examples import PackedBatch
from tests.tiny_models import TARGET_CONFIGS, make_target
from tests.unit.training.ttt_cases import Document, WrittenOutStorage, documents, pack, states_of, usual_batch

SPEC = AttentionSpec(layer=0, scale=0.4, sliding_window=None)


@dataclass(frozen=True)
class FinishedHeads:
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def of(self, row: int, slots: slice) -> "FinishedHeads":
        return FinishedHeads(self.query[row, slots], self.key[row, slots], self.value[row, slots])


def random_heads(
    batch: PackedBatch, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float64
) -> FinishedHeads:
    shape = (batch.rows, batch.length)
    return FinishedHeads(
        torch.randn(*shape, heads, head_dim, dtype=dtype, requires_grad=True),
        torch.randn(*shape, kv_heads, head_dim, dtype=dtype, requires_grad=True),
        torch.randn(*shape, kv_heads, head_dim, dtype=dtype, requires_grad=True),
    )


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 5), (6, 2, 12), (7, 1, 16)])
@pytest.mark.parametrize("max_scores", [1, 300, 1 << 22])  # one query, some, or all at a time
def test_outputs_and_gradients_are_those_of_the_written_out_mask(
    heads: int, kv_heads: int, head_dim: int, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
    batch = usual_batch()
    passes = [random_heads(batch, heads, kv_heads, head_dim) for _ in range(4)]
    leaves = [leaf for given in passes for leaf in given.finished()]
    storage = TttStorage(DocumentLayout(batch))
    outputs = [storage.attend(given, SPEC) for given in passes]
    valid = batch.document >= 0
    cotangents = [torch.randn_like(out) * valid[..., None, None] for out in outputs]
    expected = [torch.zeros_like(out) for out in outputs]
    for row, slots in documents(batch):
        one = WrittenOutStorage()
        for k, given in enumerate(passes):
            expected[k][row, slots] = one.attend(given.of(row, slots), SPEC)
    for out, right in zip(outputs, expected, strict=True):
        torch.testing.assert_close(out[valid], right[valid], rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(outputs, leaves, cotangents)
    for grad, right in zip(grads, torch.autograd.grad(expected, leaves, cotangents), strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", TARGET_CONFIGS)
def test_a_target_over_packed_documents_is_the_target_over_each(name: str) -> None:
    target, batch = make_target(TARGET_CONFIGS[name]), usual_batch()
    packed = target(batch.tokens, batch.positions, TttStorage(DocumentLayout(batch), keep=False), (2, 4))
    alone, valid = states_of(target, batch, (2, 4)), batch.document >= 0
    torch.testing.assert_close(packed.final[valid], alone.final[valid], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed.aux[valid], alone.aux[valid], rtol=1e-4, atol=1e-4)


def test_draft_keys_of_other_slots_have_no_influence() -> None:
    """Mistake 3: with a 0/1 diagonal added to an additive mask they did."""
    batch = usual_batch()
    passes = [random_heads(batch, 4, 2, 8, torch.float32) for _ in range(3)]
    slot = (0, 5)

    def last_output(own: bool) -> Tensor:
        """After the keys and values of pass 1 changed at `slot`, or everywhere else."""
        here = torch.zeros(batch.rows, batch.length, 1, 1, dtype=torch.bool)
        here[slot] = True
        changed = here if own else ~here
        middle = passes[1]
        middle = replace(middle, key=middle.key + changed * 3.0, value=middle.value - changed * 5.0)
        storage = TttStorage(DocumentLayout(batch))
        return [storage.attend(given, SPEC) for given in (passes[0], middle, passes[2])][-1][slot]

    storage = TttStorage(DocumentLayout(batch))
    plain = [storage.attend(given, SPEC) for given in passes][-1][slot]
    assert torch.equal(plain, last_output(own=False))
    assert not torch.allclose(plain, last_output(own=True), atol=1e-2)


def test_documents_do_not_see_each_other_and_padding_is_finite() -> None:
    batch = usual_batch()
    passes = [random_heads(batch, 4, 2, 8, torch.float32) for _ in range(2)]
    first = TttStorage(DocumentLayout(batch))
    plain = [first.attend(given, SPEC) for given in passes]
    changed_slots = (batch.document == 1) & (torch.arange(batch.rows) == 0)[:, None]
    changed = [FinishedHeads(*(x + 7.0 * changed_slots[..., None, None] for x in given.finished())) for given in passes]
    second = TttStorage(DocumentLayout(batch))
    for before, given in zip(plain, changed, strict=True):
        after = second.attend(given, SPEC)
        assert torch.equal(before[~changed_slots], after[~changed_slots])
        assert not torch.allclose(before[changed_slots], after[changed_slots], atol=1e-2)
        assert after.isfinite().all()
    padding = batch.document < 0
    alone = passes[0].value.repeat_interleave(2, dim=2)
    torch.testing.assert_close(plain[0][padding], alone[padding])  # a padding slot sees itself


@pytest.mark.parametrize("window", [None, 4])
def test_recorded_mass_is_that_of_the_written_out_weights(window: int | None) -> None:
    batch, spec = usual_batch(), replace(SPEC, sliding_window=window)
    passes = [random_heads(batch, 6, 2, 8) for _ in range(3)]
    storage = TttStorage(DocumentLayout(batch), record=True)
    for given in passes:
        storage.attend(given, spec)
    for row, slots in documents(batch):
        one = WrittenOutStorage()
        for k, given in enumerate(passes):
            one.attend(given.of(row, slots), spec)
            weights, mass = one.weights[0][k].mean(0), storage.masses[0][k]  # [length, blocks * length]
            length = slots.stop - slots.start
            torch.testing.assert_close(mass.sink[row, slots], weights[:, 0].float())
            torch.testing.assert_close(mass.own[row, slots], weights[:, length:].sum(-1).float())
            assert not mass.sink.requires_grad


@pytest.mark.parametrize("window", [None, 1, 100, 128, 300])
def test_block_masks_are_those_that_looking_at_all_pairs_gives(window: int | None) -> None:
    d = Document
    length = 5 * MASK_BLOCK - 60  # the last block is cut
    batch = pack(
        [
            [d(length=length, answer_from=1)],
            [d(length=MASK_BLOCK, answer_from=1), d(length=1, answer_from=0), d(length=300, answer_from=5)],
            [d(length=50, answer_from=1)] * 4,
        ],
        length,
    )
    mask = DocumentLayout(batch).block_mask(window)
    expected = create_block_mask(mask.mask_mod, batch.rows, None, length, length, device="cpu", BLOCK_SIZE=MASK_BLOCK)
    assert mask.shape == expected.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name
    for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
        counts = getattr(mask, name.replace("indices", "num_blocks"))
        used = torch.arange(counts.shape[-1]) < counts[..., None]
        assert torch.equal(getattr(mask, name)[used], getattr(expected, name)[used]), name
    slots = torch.arange(length)
    distance = slots[:, None] - slots
    same = (batch.document[:, :, None] == batch.document[:, None, :]) & (distance >= 0)
    same &= (batch.document[:, :, None] >= 0) | (distance == 0)
    if window is not None:
        same &= distance < window
    assert torch.equal(create_mask(mask.mask_mod, batch.rows, None, length, length, device="cpu")[:, 0], same)


def test_no_tensor_grows_with_the_square_of_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 1 << 15
    monkeypatch.setattr(attention, "MAX_SCORES", bound)
    batch = pack([[Document(length=1000, answer_from=3), Document(length=24, answer_from=3)]], 1024)
    passes = [random_heads(batch, 2, 1, 8, torch.float32) for _ in range(3)]
    with LargestTensor() as largest:
        storage = TttStorage(DocumentLayout(batch), record=True)
        sum(storage.attend(given, SPEC).sum() for given in passes).backward()
    assert largest.numel <= bound < 1024 * 1024


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_what_flex_attention_refuses_goes_another_way_and_says_so() -> None:
    batch = usual_batch()
    given = random_heads(batch, 2, 1, 8, torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        out = TttStorage(DocumentLayout(batch, backend="flex")).attend(given, SPEC)
        TttStorage(DocumentLayout(batch, backend="flex")).attend(given, SPEC)
    assert torch.equal(out, TttStorage(DocumentLayout(batch, backend="reference")).attend(given, SPEC))
    assert len(caught) == 1
    assert "head_dim 8" in str(caught[0].message)


def test_autocast_does_not_reach_the_scores() -> None:
    batch = usual_batch()
    given = random_heads(batch, 4, 2, 8, torch.float32)
    plain = TttStorage(DocumentLayout(batch)).attend(given, SPEC)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plain, TttStorage(DocumentLayout(batch)).attend(given, SPEC))
