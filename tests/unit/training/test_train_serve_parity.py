"""Training and serving draft the same: per-depth logits of one unrolled slot, in training and in both serving paths.

The serving side is built from the parts that serve: the dense cache of the reference loop, and the engine's paged cache
with its passes for prompts and for draft steps. It is fed the tokens that training reads.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fledge.decoding.drafting import SettledRows, draft_chain
from fledge.layers.dense_cache import DenseCache
from fledge.layers.paged_cache import ChunkPass, PagedCache, RoundPass
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.drafter.eagle import Eagle3Drafter, EagleDrafter
from fledge.models.target.decoder import TargetModel, TargetStates
from fledge.training.attention import DocumentLayout, TttStorage
from fledge.training.data.examples import PackedBatch
from fledge.training.ttt import StepInputs
from tests.tiny_models import make_drafter, make_target
from tests.unit.training.ttt_cases import VARIANTS, documents, states_of, usual_batch

DEPTH = 5
TOLERANCE = 2e-5  # of the largest logit: float32, sums in another order, five steps deep


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return make_target()


def training_logits(drafter: Drafter, batch: PackedBatch, states: TargetStates) -> Tensor:
    """[depth, rows, length, draft_vocab]: as `TttModel` feeds the drafter."""
    storage, feature, logits = TttStorage(DocumentLayout(batch)), drafter.fuse(states), []
    for step in range(DEPTH):
        inputs = StepInputs.of(batch, step)
        out = drafter(inputs.tokens, feature, inputs.positions, storage)
        feature = out.feature
        logits.append(drafter.logits(out.head))
    return torch.stack(logits)


def dense_serving(drafter: Drafter, settled: SettledRows, forced: Tensor) -> Tensor:
    """[1 + forced, draft_vocab]: the reference loop's path, with `forced` in place of the tokens it would draft."""
    cache = DenseCache(drafter.config.num_layers)
    states = drafter(settled.tokens, settled.features, settled.positions, cache.extend(settled.positions))
    logits = [drafter.logits(states.head[-1])]
    position = settled.positions[-1:]
    for token in forced:
        position = position + 1
        states = drafter(token[None], states.feature[-1:], position, cache.extend(position))
        logits.append(drafter.logits(states.head[-1]))
    return torch.stack(logits)


def engine_serving(drafter: Drafter, settled: SettledRows, forced: Tensor) -> Tensor:
    """The same through the engine's paged cache: the prompt as a chunk, then rounds of one row."""
    block_size, n = 4, len(settled.tokens)
    blocks = -(-(n + DEPTH) // block_size)
    cache = PagedCache(
        drafter.config.layer.kv_cache,
        num_layers=drafter.config.num_layers,
        num_blocks=2 * blocks,
        block_size=block_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    table = torch.randperm(2 * blocks)[:blocks].int()[None]  # blocks lie anywhere

    def slots(positions: Tensor) -> Tensor:
        return table[0, positions // block_size].long() * block_size + positions % block_size

    prompt = ChunkPass(
        cache=cache,
        block_tables=table,
        context_lens=torch.zeros(1, dtype=torch.int32),
        query_starts=torch.tensor([0, n], dtype=torch.int32),
        slots=slots(settled.positions),
        max_chunk=n,
        max_context=64,
    )
    states: DraftStates = drafter(settled.tokens, settled.features, settled.positions, prompt)
    logits, feature = [drafter.logits(states.head[-1])], states.feature[-1:]
    for step, token in enumerate(forced):
        position = settled.positions[-1:] + 1 + step
        one = RoundPass(
            cache=cache, block_tables=table, context_lens=position, slots=slots(position), rows=1, max_context=64
        )
        states = drafter(token[None], feature, position, one)
        feature = states.feature
        logits.append(drafter.logits(states.head[-1]))
    return torch.stack(logits)


def compare(drafter: Drafter, target: TargetModel, serve) -> int:
    """Check every slot of every document from which something can be drafted; return how many there were."""
    batch = usual_batch()
    states = states_of(target, batch, drafter.aux_layer_ids)
    trained = training_logits(drafter, batch, states)
    checked = 0
    for row, place in documents(batch):
        tokens = batch.tokens[row, place]
        aux = None if states.aux is None else states.aux[row, place]
        features = drafter.fuse(TargetStates(final=states.final[row, place], aux=aux))
        for t in range(len(tokens) - 1):
            settled = SettledRows(tokens=tokens[1 : t + 2], features=features[: t + 1], positions=torch.arange(t + 1))
            served = serve(drafter, settled, tokens[t + 2 : t + 1 + DEPTH])
            mine = trained[: len(served), row, place.start + t]
            bound = TOLERANCE * max(1.0, served.abs().max().item())  # EAGLE-1's state, and its logits, grow with depth
            torch.testing.assert_close(mine, served, rtol=0, atol=bound)
            checked += len(served)
    return checked


@pytest.mark.parametrize("serve", [dense_serving, engine_serving])
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_logits_at_every_depth_are_those_of_serving(name: str, serve, target: TargetModel) -> None:
    drafter = make_drafter(VARIANTS[name], target)
    if isinstance(drafter, EagleDrafter):  # nothing norms its attention's input: large scores magnify every rounding
        drafter.fc.weight *= 0.2
    assert compare(drafter, target, serve) > 100


@torch.no_grad()
def test_forced_steps_are_what_the_reference_loop_drafts(target: TargetModel) -> None:
    """Ties `dense_serving` to `draft_chain`: forced to the tokens it drafts itself, it chooses these tokens again."""
    drafter = make_drafter(VARIANTS["reduced-vocabulary"], target)
    batch = usual_batch()
    states = states_of(target, batch, drafter.aux_layer_ids)
    features = drafter.fuse(states)[0, :6]
    settled = SettledRows(tokens=batch.tokens[0, 1:7], features=features, positions=torch.arange(6))
    chain = draft_chain(drafter, DenseCache(drafter.config.num_layers), settled, DEPTH)
    logits = dense_serving(drafter, settled, chain.tokens[:-1])
    assert torch.equal(drafter.to_target_ids(logits.argmax(-1)), chain.tokens)


class FeedsBackBeforeTheNorm(Eagle3Drafter):
    """Mistake 1: the final norm was put before the head only, while servers feed what comes after it."""

    def forward(self, *args) -> DraftStates:
        seen = []
        hook = self.norm.add
        self.norm.add = lambda x, residual: (seen.append(x + residual), hook(x, residual))[1]
        try:
            states = super().forward(*args)
        finally:
            del self.norm.add
        return replace(states, feature=seen[-1])


@pytest.mark.parametrize("name", ["eagle3.1", "norm-output-only"])
@torch.no_grad()
def test_feeding_back_before_the_norm_would_be_noticed(name: str, target: TargetModel) -> None:
    drafter = make_drafter(VARIANTS[name], target)
    wrong = FeedsBackBeforeTheNorm(VARIANTS[name])
    wrong.load_state_dict(drafter.state_dict(), strict=False)
    wrong.share_with(target)

    def serve_rightly(_drafter: Drafter, settled: SettledRows, forced: Tensor) -> Tensor:
        return dense_serving(drafter, settled, forced)

    assert compare(drafter, target, serve_rightly) > 100
    with pytest.raises(AssertionError, match="not close"):
        compare(wrong, target, serve_rightly)


@torch.no_grad()
def test_rows_shifted_by_one_would_be_noticed(target: TargetModel) -> None:
    """The other classic: positions one off are invisible without a comparison like this one."""
    drafter = make_drafter(VARIANTS["eagle3.1"], target)

    def serve_late(drafter: Drafter, settled: SettledRows, forced: Tensor) -> Tensor:
        positions = settled.positions.clone()
        positions[-1] += 1
        return dense_serving(drafter, replace(settled, positions=positions), forced)

    with pytest.raises(AssertionError, match="not close"):
        compare(drafter, target, serve_late)
