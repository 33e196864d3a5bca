"""Replayed rounds are the engine's, and what is recorded of them is what a slow and simple count gives."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.drift import storages
from fledge.drift.prompts import Segment
from fledge.drift.replay import (
    NO_INTERVENTION,
    FinishedText,
    Intervention,
    Replay,
    Replayed,
    fusion_parts,
    rounds_taken,
    target_states,
)
from fledge.drift.storages import CausalPass, Rows, VerifiedRows, causal_attention
from fledge.engine.outputs import RoundRecord
from fledge.layers.attention import AttentionSpec, KeyValueStorage, ProjectedHeads
from fledge.layers.dense_cache import DenseCache, DensePass
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.drafter.eagle import Eagle3Drafter
from tests import engine_cases
from tests.engine_cases import DRAFTERS, drafter, drafts_after, greedy, make_engine, target
from tests.tiny_models import TARGET_CONFIGS, TINY_TARGET, drafter_configs, make_drafter, make_target

PROMPT = (3, 4, 5, 2, 0, 3)
SEGMENTS = [
    Segment.SINK,
    Segment.SYSTEM,
    Segment.TEMPLATE,
    Segment.USER,
    Segment.USER,
    Segment.TEMPLATE,
    *[Segment.OUTPUT] * 60,
]


@pytest.mark.parametrize("name", TARGET_CONFIGS)
@torch.no_grad()
def test_targets_of_all_families_have_their_states(name: str) -> None:
    """Of several texts in one pass, by the storage that keeps nothing."""
    made = make_target(TARGET_CONFIGS[name])
    texts = [torch.randint(0, made.config.vocab_size, (length,)) for length in (13, 1, 20)]
    positions = [torch.arange(len(text)) for text in texts]
    rows = Rows([len(text) for text in texts])
    found = made(torch.cat(texts), torch.cat(positions), CausalPass(rows), (2, 5))
    for text, at, final, aux in zip(
        texts, positions, *(x.split(rows.counts) for x in (found.final, found.aux)), strict=True
    ):
        alone = made(text, at, DenseCache(made.config.num_layers).extend(at), (2, 5))
        torch.testing.assert_close(final, alone.final, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(aux, alone.aux, rtol=1e-4, atol=1e-4)


def served(name: str, depth: int, max_tokens: int = 24) -> tuple[list[int], list[RoundRecord], dict[int, list[int]]]:
    """What the engine does: the sequence, its rounds, and what each round was given to verify."""
    engine = make_engine(drafts=drafter(name), depth=depth)
    request = greedy(PROMPT, max_tokens=max_tokens).submit(engine, "0")
    drafts: dict[int, list[int]] = {}
    while engine.has_unfinished:
        engine.step()
        if request.row is not None:
            count = int(engine.runner.state.draft_count[request.row])
            drafts[len(request.tokens)] = engine.runner.state.drafts[request.row, :count].tolist()
    return request.tokens, request.rounds, drafts


def finished_text(
    model: Drafter, tokens: Sequence[int], starts: Sequence[int], of: Any = None, **more: Any
) -> FinishedText:
    (states,) = target_states(of or target(), [tokens], model.aux_layer_ids)
    return FinishedText(states=states, tokens=tokens, segments=SEGMENTS[: len(tokens)], starts=starts, **more)


def replayed(
    model: Drafter,
    tokens: Sequence[int],
    starts: Sequence[int],
    depth: int,
    *,
    intervention: Intervention = NO_INTERVENTION,
    of: Any = None,
    **settings: Any,
) -> Replayed:
    (found,) = Replay(model, [finished_text(model, tokens, starts, of)], **settings).draft(
        [starts], depth, intervention
    )
    return found


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_round_drafts_what_the_engine_drafted(name: str) -> None:
    tokens, rounds, drafts = served(name, depth=4)
    starts = [record.start for record in rounds]
    assert starts[0] == len(PROMPT) + 1
    assert starts[1:] == [record.start + record.accepted + 1 for record in rounds[:-1]]
    found = replayed(drafter(name), tokens, starts, depth=6)
    for r, record in enumerate(rounds):
        assert found.drafts[r, : record.drafted].tolist() == drafts[record.start][: record.drafted]
        deeper, _ = drafts_after(name, tuple(tokens[: record.start]), 6)
        assert found.drafts[r].tolist() == list(deeper)


class Spy:
    """A dense storage that also works out all attention weights, one row at a time."""

    def __init__(self, inner: DensePass) -> None:
        self.inner = inner
        self.weights: list[Tensor] = []  # by layer, [heads, keys], of the last row

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        mixed = self.inner.attend(heads, spec)
        query, key, _ = heads.finished()
        keys, _ = self.inner.cache._stored[spec.layer]
        group = query.shape[1] // key.shape[1]
        scores = [keys[:, h // group] @ query[-1, h] * spec.scale for h in range(query.shape[1])]
        hidden = self.inner.distance[-1] >= (spec.sliding_window or len(keys))
        each = [score.masked_fill(hidden, -math.inf).softmax(0) for score in scores]
        self.weights.append(torch.stack(each))
        return mixed


@torch.no_grad()
def drafted_slowly(model: Drafter, text: Sequence[int], depth: int) -> list[tuple[list[Tensor], DraftStates, int]]:
    """One round by itself after `text`: by depth the weights of each layer, the states and the draft."""
    tokens, positions = torch.tensor(text), torch.arange(len(text))
    states = target()(tokens, positions, DenseCache(8).extend(positions), model.aux_layer_ids)
    cache = DenseCache(model.config.num_layers)
    spy = Spy(cache.extend(positions[:-1]))
    storage: KeyValueStorage = spy
    out = model(tokens[1:], model.fuse(states)[:-1], positions[:-1], storage)
    steps = []
    for d in range(depth):
        if d:
            position = positions[-1:] + d - 1
            spy = Spy(cache.extend(position))
            out = model(torch.tensor([steps[-1][2]]), out.feature[-1:], position, spy)
        draft = int(model.to_target_ids(model.logits(out.head[-1:]).argmax(-1)))
        steps.append((spy.weights, out, draft))
    return steps


@pytest.mark.parametrize(
    "name", ["eagle1", "eagle3", "eagle3.1", "two-layers", "windows", "qwen3-style", "reduced-vocabulary"]
)
def test_what_is_recorded_is_what_a_round_by_itself_does(name: str) -> None:
    tokens = [*PROMPT, *torch.randint(0, 6, (12,), generator=torch.Generator().manual_seed(3)).tolist()]
    starts, depth = [3, 9, 14], 4  # the first begins with fewer rows than the recent window has
    found = replayed(drafter(name), tokens, starts, depth, recent_tokens=3)
    for r, start in enumerate(starts):
        for d, (weights, states, draft) in enumerate(drafted_slowly(drafter(name), tokens[:start], depth)):
            segments = [*SEGMENTS[: start - 1], *[Segment.DRAFTED] * d]
            position = start - 2 + d
            for layer, of_layer in enumerate(weights):
                for head, each in enumerate(of_layer):
                    assert len(each) == len(segments)
                    mass = [0.0] * len(Segment)
                    for weight, segment in zip(each.tolist(), segments, strict=True):
                        mass[segment] += weight
                    assert found.mass[r, d, layer, head].tolist() == pytest.approx(mass, abs=1e-9)
                    entropy = -sum(w * math.log(w) for w in each.tolist() if w > 0)
                    assert float(found.entropy[r, d, layer, head]) == pytest.approx(entropy)
                    assert float(found.recent[r, d, layer, head]) == pytest.approx(sum(each.tolist()[-3:]), abs=1e-9)
                    distance = sum(w * (position - key) for key, w in enumerate(each.tolist()))
                    assert float(found.distance[r, d, layer, head]) == pytest.approx(distance, abs=1e-9)
            assert int(found.drafts[r, d]) == draft
            assert float(found.head_rms[r, d]) == pytest.approx(float(states.head[-1].square().mean().sqrt()))
            assert float(found.feature_rms[r, d]) == pytest.approx(float(states.feature[-1].square().mean().sqrt()))
            confidence = float(drafter(name).logits(states.head[-1:]).softmax(-1).max())
            assert float(found.confidence[r, d]) == pytest.approx(confidence)
            widest = max(drafter(name).config.sliding_windows or (len(segments),))
            counts = [segments[-widest:].count(segment) for segment in Segment]
            assert found.visible[r, d].tolist() == counts
    assert torch.allclose(found.mass.sum(-1), torch.ones_like(found.entropy))


def test_cosines_compare_the_state_with_the_targets_at_the_place_it_stands_for() -> None:
    tokens = [*PROMPT, 2, 4, 1, 5, 3]
    model = drafter("eagle3")
    found = replayed(model, tokens, [7, 10], depth=3)
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        states = target()(torch.tensor(tokens), positions, DenseCache(8).extend(positions), model.aux_layer_ids)
        fused = model.fuse(states)
        for r, start in enumerate([7, 10]):
            for d, (_, own, _) in enumerate(drafted_slowly(model, tokens[:start], 3)):
                # Row start - 2 + d predicts place start + d; so does the target's state at start - 1 + d.
                place = start - 1 + d
                if place >= len(tokens):
                    assert found.head_cosine[r, d].isnan()
                    continue
                for cosine, mine, truth in (
                    (found.head_cosine, own.head, states.final),
                    (found.feature_cosine, own.feature, fused),
                ):
                    expected = float(mine[-1] @ truth[place] / mine[-1].norm() / truth[place].norm())
                    assert float(cosine[r, d]) == pytest.approx(expected, abs=1e-6)


def test_a_narrow_drafter_has_no_state_to_compare_with_the_targets() -> None:
    found = replayed(drafter("narrow"), (*PROMPT, 2, 3, 4), [7], depth=2)
    assert found.head_cosine.isnan().all()
    assert not found.feature_cosine.isnan().any()


@pytest.mark.parametrize("name", ["eagle1", "eagle3.1", "two-layers"])
def test_without_queries_attention_is_even(name: str) -> None:
    model = make_drafter(DRAFTERS[name], make_target(engine_cases.TARGET), seed=2)
    for layer in model.layers:  # type: ignore[union-attr]
        config = layer.self_attn.config
        layer.self_attn.qkv_proj.weight[: config.query_size] = 0
    tokens = [*PROMPT, *[2] * 10]
    found = replayed(model, tokens, [7, 12], depth=5, of=make_target(engine_cases.TARGET))
    for r, start in enumerate([7, 12]):
        for d in range(5):
            rows = start - 1 + d
            shares = [[*SEGMENTS[: start - 1], *[Segment.DRAFTED] * d].count(s) / rows for s in Segment]
            for head in found.mass[r, d].flatten(0, 1):
                assert head.tolist() == pytest.approx(shares, abs=1e-6)
            assert found.entropy[r, d].flatten().tolist() == pytest.approx(
                [math.log(rows)] * found.entropy[r, d].numel()
            )
            assert found.distance[r, d].flatten().tolist() == pytest.approx(
                [(rows - 1) / 2] * found.distance[r, d].numel(), rel=1e-5
            )


def test_work_in_pieces_changes_nothing() -> None:
    tokens = [*PROMPT, *torch.randint(0, 6, (20,), generator=torch.Generator().manual_seed(5)).tolist()]
    starts = [7, 8, 10, 13, 17, 26]
    whole = replayed(drafter("two-layers"), tokens, starts, depth=4)
    for max_scores in (1, 90, 150, 250):  # one round at a time, and up to four
        pieces = replayed(drafter("two-layers"), tokens, starts, depth=4, max_scores=max_scores)
        for field in fields(Replayed):
            one, other = getattr(whole, field.name), getattr(pieces, field.name)
            torch.testing.assert_close(one, other, equal_nan=True)


def test_a_pinned_state_is_fed_at_its_first_size_and_noise_is_the_rounds_own() -> None:
    feature, first = torch.randn(3, 512), torch.randn(3, 512)
    pinned = Intervention(pin=True)(4 * feature, 2 * first, [7, 8, 9], 2)
    torch.testing.assert_close(pinned.square().mean(-1), (2 * first).square().mean(-1))
    torch.testing.assert_close(F.cosine_similarity(pinned, feature), torch.ones(3))
    noisy = Intervention(noise=0.5)
    added = noisy(4 * feature, first, [7, 8, 9], 2) - 4 * feature
    sizes = added.square().mean(-1).sqrt() / (4 * feature).square().mean(-1).sqrt()
    assert sizes.tolist() == pytest.approx([0.5] * 3, rel=0.1)
    alone = noisy(4 * feature[1:2], first[1:2], [8], 2) - 4 * feature[1:2]
    torch.testing.assert_close(alone, added[1:2])  # whatever rounds are drafted with it
    assert not torch.allclose(noisy(feature, first, [7, 8, 9], 3), noisy(feature, first, [7, 8, 9], 2))
    assert torch.equal(NO_INTERVENTION(feature, first, [7, 8, 9], 2), feature)


def test_what_is_fed_on_decides_the_drafts_after_the_first() -> None:
    tokens = [*PROMPT, *[2] * 6]
    plain, noisy, pinned = (
        replayed(drafter("eagle3"), tokens, [7, 8, 9], depth=8, intervention=intervention)
        for intervention in (NO_INTERVENTION, Intervention(noise=2.0), Intervention(pin=True))
    )
    for other in (noisy, pinned):
        assert torch.equal(other.hidden_rms[:, 0], plain.hidden_rms[:, 0])
        assert torch.equal(other.mass[:, 0], plain.mass[:, 0])
    assert not torch.equal(noisy.drafts, plain.drafts)
    growth = [one.hidden_rms[:, -1].mean() / one.hidden_rms[:, 0].mean() for one in (plain, pinned)]
    assert growth[1] < growth[0]


def test_norm_output_decides_which_state_is_fed_on() -> None:
    tokens = [*PROMPT, *[2] * 6]
    three, three_one = (replayed(drafter(name), tokens, [7, 8, 9], depth=8) for name in ("eagle3", "eagle3.1"))
    assert torch.equal(three.feature_rms, three.hidden_rms)
    assert torch.equal(three_one.feature_rms, three_one.head_rms)
    growth = three.feature_rms.mean(0) / three.feature_rms.mean(0)[0]
    assert growth[-1] > 1.5  # an unnormalised stream only ever gets additions
    flat = three_one.feature_rms.mean(0) / three_one.feature_rms.mean(0)[0]
    assert (flat - 1).abs().max() < 0.2
    assert torch.equal(*(replayed(drafter("eagle1"), tokens, [7], 3).__dict__[n] for n in ("hidden_rms", "head_rms")))


@pytest.mark.parametrize(("fc_norm", "norm_before_fc"), [(False, False), (True, False), (False, True)])
def test_contributions_by_hand(fc_norm: bool, norm_before_fc: bool) -> None:
    made = make_target(TINY_TARGET)
    config = replace(drafter_configs()["eagle3"], fc_norm=fc_norm, norm_before_fc=norm_before_fc)
    model = make_drafter(config, made)
    assert isinstance(model, Eagle3Drafter)
    factors = (1.0, 2.0, 0.5)
    model.fc.weight.copy_(torch.cat([factor * torch.eye(32) for factor in factors], dim=1))
    for norm in [*(model.fc_norm or ()), model.input_norm]:
        if norm is not None:
            norm.weight.fill_(1.0)
    tokens = list(range(2, 12))
    found = replayed(model, tokens, [5, 8], depth=1, of=made)
    assert fusion_parts(model) == ("layer 2", "layer 4", "layer 5")
    positions = torch.arange(len(tokens))
    states = made(torch.tensor(tokens), positions, DenseCache(8).extend(positions), model.aux_layer_ids)
    assert states.aux is not None
    for r, slot in enumerate([3, 6]):
        chunks = states.aux[slot].view(3, 32)
        if norm_before_fc:
            chunks = chunks / chunks.square().mean().sqrt()
        norms = chunks.norm(dim=-1)
        if fc_norm:
            norms = torch.full((3,), 32**0.5)  # whatever the layer, its normed state has an RMS of 1
        assert found.contributions[r].tolist() == pytest.approx((norms * torch.tensor(factors)).tolist(), rel=1e-3)
        assert float(found.fused_rms[r]) == pytest.approx(
            float(model.fuse(states)[slot].square().mean().sqrt()), rel=1e-4
        )


def test_contributions_of_eagle1_are_those_of_token_and_feature() -> None:
    model = drafter("eagle1")
    found = replayed(model, (*PROMPT, 2, 3), [7], depth=1)
    assert fusion_parts(model) == ("embedding", "final state")
    embedding = model.embed(torch.tensor(2)) @ model.fc.weight[:, :16].T  # type: ignore[operator, index, union-attr]
    assert float(found.contributions[0, 0]) == pytest.approx(float(embedding.norm()), rel=1e-5)


@pytest.mark.parametrize("sinks", [None, torch.tensor([-1.0, 0.0, 1.0, 2.0])])
@pytest.mark.parametrize(
    ("window", "chunked"), [(None, False), (3, False), (3, True), (5, False), (5, True), (100, False)]
)
def test_causal_attention_of_targets_with_windows(
    window: int | None, chunked: bool, sinks: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storages, "_WINDOW_CHUNK", 4)
    query, key, value = torch.randn(13, 4, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 8)
    (mixed,) = causal_attention(
        *(x[None] for x in (query, key, value)), scale=0.3, window=window, chunked=chunked, sinks=sinks
    )
    for i in range(13):
        first = 0 if window is None else i // window * window if chunked else max(0, i - window + 1)
        for h in range(4):
            weights = (key[first : i + 1, h // 2] @ query[i, h] * 0.3).exp()
            total = weights.sum() + (0 if sinks is None else sinks[h].exp())
            torch.testing.assert_close(mixed[i, h], weights / total @ value[first : i + 1, h // 2])


def test_bfloat16_pairs_are_recorded_in_float32() -> None:
    made = make_target(engine_cases.TARGET).bfloat16()
    model = make_drafter(DRAFTERS["eagle3.1"], make_target(engine_cases.TARGET), seed=2).bfloat16()
    model.share_with(made)
    tokens = [*PROMPT, 2, 3]
    found = replayed(model, tokens, [7, 8], depth=3, of=made)
    assert found.mass.dtype == torch.float32
    torch.testing.assert_close(found.mass.sum(-1), torch.ones_like(found.entropy))


def test_values_may_be_narrower_than_keys() -> None:
    """What is kept of a layer says how wide it is: latent attention has values of another width than its keys."""
    verified = VerifiedRows(Rows([4]), torch.tensor([Segment.SINK, *[Segment.USER] * 3]), [(0, 1), (0, 3)])
    query, keys, values = torch.randn(2, 4, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 5)
    spec = AttentionSpec(layer=0, scale=0.3, sliding_window=None)
    verified.keep(spec, query, keys[None], values[None])
    own = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 5)
    mixed, record = verified.attend_and_record(0, verified.rounds([0, 1]), query, (own[0][None], own[1][None]))
    for r, slot in enumerate((1, 3)):
        for h in range(4):
            seen = torch.cat([keys[: slot + 1, h // 2], own[0][r, :, h // 2]])
            weights = (seen @ query[r, h] * 0.3).softmax(0)
            expected = weights @ torch.cat([values[: slot + 1, h // 2], own[1][r, :, h // 2]])
            torch.testing.assert_close(mixed[r, h], expected)
            assert float(record["mass"][r, h, Segment.DRAFTED]) == pytest.approx(float(weights[-1]))


@pytest.mark.parametrize("name", ["eagle1", "two-layers", "windows"])
def test_sequences_that_share_a_pass_are_drafted_as_each_by_itself(name: str) -> None:
    """Of different lengths and numbers of rounds, one without any; all together, and in pieces of both kinds."""
    model, generator = drafter(name), torch.Generator().manual_seed(7)
    lengths, starts = (20, 9, 31, 13), ([7, 8, 15, 20], [], [2, 9, 30], [4, 5, 6, 7, 8, 13])
    texts = [torch.randint(0, 6, (length,), generator=generator).tolist() for length in lengths]
    states = target_states(target(), texts, model.aux_layer_ids)
    several = [
        FinishedText(states=state, tokens=text, segments=SEGMENTS[: len(text)], starts=range(2, len(text) + 1))
        for state, text in zip(states, texts, strict=True)
    ]
    for intervention, max_scores in (
        (NO_INTERVENTION, 1 << 20),
        (Intervention(noise=1.0), 1 << 20),
        (NO_INTERVENTION, 700),
        (NO_INTERVENTION, 1),
    ):
        found = Replay(model, several, max_scores=max_scores).draft(starts, 4, intervention)
        for one, text, begun in zip(found, texts, starts, strict=True):
            if begun:
                alone = replayed(model, text, begun, 4, intervention=intervention)
                for field in fields(Replayed):
                    torch.testing.assert_close(
                        getattr(one, field.name), getattr(alone, field.name), equal_nan=True, msg=field.name
                    )
            assert len(one.drafts) == len(begun)
    leading = Replay(model, several).matching_drafts(4, Intervention(pin=True))
    every = Replay(model, several).draft([one.starts for one in several], 4, Intervention(pin=True))
    for counts, text, one in zip(leading, texts, every, strict=True):
        for count, start, drafts in zip(counts, range(2, len(text) + 1), one.drafts.tolist(), strict=True):
            matches = [draft == token for draft, token in zip(drafts, text[start:], strict=False)]
            assert count == ([*matches, False].index(False))
    assert max(map(max, leading)) > 1


@pytest.mark.parametrize("name", ["eagle1", "eagle3.1"])
def test_rounds_follow_from_the_text_and_what_the_target_would_say_next(name: str) -> None:
    tokens, rounds, _ = served(name, depth=4)
    longer, *_ = served(name, depth=4, max_tokens=30)
    assert longer[: len(tokens)] == tokens
    starts = range(len(PROMPT) + 1, len(tokens))
    beyond = longer[len(tokens) :]
    (leading,) = Replay(drafter(name), [finished_text(drafter(name), tokens, starts, beyond=beyond)]).matching_drafts(4)
    assert rounds_taken(starts, leading, depth=4, known=len(longer), limit=256) == rounds
    # Where the text alone is known, its last round accepts no more of it than there is.
    cut = rounds_taken(starts, leading, depth=4, known=len(tokens), limit=256)
    assert cut[:-1] == rounds[:-1]
    assert cut[-1].start + cut[-1].accepted <= len(tokens)
    assert [one.drafted for one in rounds_taken([5, 6], [0, 0], depth=4, known=20, limit=8)] == [2, 1]
    assert rounds_taken([7], [0], depth=4, known=20, limit=8) == []
