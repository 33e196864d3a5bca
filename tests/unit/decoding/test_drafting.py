"""Drafting with a cache that grows, shrinks and is overwritten, against drafting from scratch.

From scratch means: the target runs over the whole verified text once more, every row of the drafter gets its real
feature, and each draft step runs the whole sequence again in one causal pass. No cache, no resynchronisation, no tree
mask, so none of them can be wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from fledge.decoding import reference
from fledge.decoding.drafting import DraftChain, SettledRows, TreeShape, draft_chain, draft_tree
from fledge.decoding.params import SamplingParams
from fledge.decoding.reference import Speculation, generate
from fledge.decoding.tree import DraftTree
from fledge.layers.dense_cache import DenseCache
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.target.decoder import TargetModel
from tests.tiny_models import TINY_TARGET, drafter_configs, make_drafter, make_target
from tests.toy_models import check_tree

TARGET = make_target(
    replace(TINY_TARGET, vocab_size=6)
).double()  # so small that random drafters are right now and then
PROMPT, DEPTH = [2, 5, 1], 4
LAST = 3  # rounds are looked at: rows that went wrong in earlier ones are still in the cache
# Scores are float32, and the norms inside; a wrong row moves them by 0.1 and more. The rest is float64, because EAGLE-1
# norms nothing on its way and random weights turn float32's rounding into differences of 0.01 within four steps.
TOLERANCE = 1e-4

Path = tuple[int, ...]


@pytest.fixture(params=drafter_configs(), name="drafter")
def _drafter(request: pytest.FixtureRequest) -> Drafter:
    return make_drafter(drafter_configs(TARGET.config)[request.param], TARGET, seed=3).double()


class FromScratch:
    """The drafter's log-probabilities after any path of drafts that follows the verified `text`."""

    def __init__(self, target: TargetModel, drafter: Drafter, text: Sequence[int]) -> None:
        self.drafter = drafter
        self.text = list(text)
        known = torch.tensor(self.text[:-1])  # nobody has seen the last token's state yet
        positions = torch.arange(len(known))
        storage = DenseCache(target.config.num_layers).extend(positions)
        self.features = drafter.fuse(target(known, positions, storage, drafter.aux_layer_ids))
        self.states = cache(self._states)  # a path asks for those of all its beginnings

    def _states(self, path: Path) -> DraftStates:
        features = self.features
        for i in range(len(path)):
            features = torch.cat([features, self.states(path[:i]).feature[-1:]])
        positions = torch.arange(len(features))
        storage = DenseCache(self.drafter.config.num_layers).extend(positions)
        return self.drafter(torch.tensor([*self.text[1:], *path]), features, positions, storage)

    def logits(self, path: Path) -> Tensor:
        return self.drafter.full_vocab_logits(self.states(path).head[-1])

    def tree(self, depth: int, shape: TreeShape) -> dict[Path, float]:
        """EAGLE-2 by its definition: the kept paths and their log-probabilities."""
        candidates: dict[Path, float] = {}
        frontier: dict[Path, float] = {(): 0.0}
        for _ in range(depth):
            level = {}
            for path, score in frontier.items():
                best = self.logits(path).log_softmax(-1).topk(shape.width)
                for logprob, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    level[(*path, token)] = score + logprob
            candidates |= level
            frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: shape.width])
        return dict(sorted(candidates.items(), key=lambda item: -item[1])[: shape.budget])


def paths_of(tree: DraftTree) -> dict[Path, float]:
    paths: list[Path] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, tree.scores.tolist(), strict=True))


def drafts_of_a_run(
    monkeypatch: pytest.MonkeyPatch, propose: Callable[..., object], params: SamplingParams, speculation: Speculation
) -> list[tuple[list[int], object]]:
    """Run the loop; return each draft with the text it continues. Drafts have stood and fallen on the way."""
    drafts: list[object] = []

    def spy(*args: object) -> object:
        drafts.append(propose(*args))
        return drafts[-1]

    monkeypatch.setattr(reference, propose.__name__, spy)
    rounds = list(generate(TARGET, PROMPT, params, speculation=speculation))
    drafted = [done for done in rounds if done.drafted]
    assert len(drafts) == len(drafted) > 3
    assert any(done.accepted > 0 for done in drafted)
    assert any(done.accepted < done.drafted for done in drafted)

    text, texts = list(PROMPT), []
    for done in rounds[:-1]:
        text = [*text, *done.tokens]
        texts.append(text)
    return list(zip(texts, drafts, strict=True))


@torch.no_grad()
def test_argmax_chains(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    run = drafts_of_a_run(monkeypatch, draft_chain, params, Speculation(drafter=drafter, depth=DEPTH))
    for text, draft in run[-LAST:]:
        assert isinstance(draft, DraftChain)
        scratch, path = FromScratch(TARGET, drafter, text), ()
        for _ in range(DEPTH):
            path = (*path, int(scratch.logits(path).argmax()))
        assert tuple(draft.tokens.tolist()) == path
        assert draft.probs is None


@torch.no_grad()
def test_sampled_chains_say_the_distribution_they_came_from(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.6, max_tokens=24)
    speculation = Speculation(drafter=drafter, depth=DEPTH, sample_drafts=True)
    for text, draft in drafts_of_a_run(monkeypatch, draft_chain, params, speculation)[-LAST:]:
        assert isinstance(draft, DraftChain)
        assert draft.probs is not None
        scratch, path = FromScratch(TARGET, drafter, text), tuple(draft.tokens.tolist())
        expected = torch.stack([(scratch.logits(path[:i]) / 0.6).softmax(-1) for i in range(DEPTH)])
        torch.testing.assert_close(draft.probs, expected.float(), atol=TOLERANCE, rtol=TOLERANCE)
        assert draft.probs[range(DEPTH), path].min() > 0


@torch.no_grad()
def test_trees(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's score is that of a chain along its path: it saw its ancestors and neither siblings nor cousins."""
    shape = TreeShape(width=3, budget=14)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    run = drafts_of_a_run(monkeypatch, draft_tree, params, Speculation(drafter=drafter, depth=DEPTH, tree=shape))
    for text, draft in run[-LAST:]:
        assert isinstance(draft, DraftTree)
        check_tree(draft)
        assert paths_of(draft) == pytest.approx(FromScratch(TARGET, drafter, text).tree(DEPTH, shape), abs=TOLERANCE)


@torch.no_grad()
def test_a_tree_of_width_one_is_the_chain(drafter: Drafter) -> None:
    text = [1, 2, 3, 5, 0, 4]
    settled = SettledRows(
        tokens=torch.tensor(text[1:]),
        features=FromScratch(TARGET, drafter, text).features,
        positions=torch.arange(len(text) - 1),
    )
    layers = drafter.config.num_layers
    chain = draft_chain(drafter, DenseCache(layers), settled, DEPTH)
    tree = draft_tree(drafter, DenseCache(layers), settled, DEPTH, TreeShape(width=1, budget=DEPTH))
    assert tree.tokens.tolist() == chain.tokens.tolist()
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    assert tree.depths.tolist() == [1, 2, 3, 4]
