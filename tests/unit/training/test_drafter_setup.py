"""The drafter at the start of training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.checkpoints.contract import check
from fledge.checkpoints.drafter import load_drafter, save_drafter
from fledge.checkpoints.reading import read_drafter
from fledge.errors import CheckpointWarning, ConfigError
from fledge.layers.config import RopeConfig
from fledge.models.config import DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter, DraftVocabulary
from fledge.models.drafter.variants import name_of
from fledge.training.attention import DocumentLayout, TttStorage
from fledge.training.capture import FledgeCapture
from fledge.training.drafter_setup import drafter_config, make_drafter
from fledge.training.recipe import DrafterSection
from tests.fit_cases import packed
from tests.tiny_models import TARGET_CONFIGS, TINY_TARGET, make_target

IDS = torch.arange(3, 27)


def vocabulary() -> DraftVocabulary:
    return DraftVocabulary.from_target_ids(IDS, TINY_TARGET.vocab_size)


def setup(
    section: DrafterSection, capture: FledgeCapture, draft: DraftVocabulary | None = None, seed: int = 0
) -> Drafter:
    config = drafter_config(section, capture.config, None if draft is None else len(draft.d2t))
    return make_drafter(section, config, capture.config, capture.ends, draft, device="cpu", seed=seed)


@pytest.fixture(name="capture", scope="module")
def _capture() -> FledgeCapture:
    return FledgeCapture(make_target())


@pytest.mark.parametrize(
    ("variant", "name", "aux"),
    [("eagle1", "EAGLE-1/2", None), ("eagle3", "EAGLE-3", (2, 4, 5)), ("eagle3.1", "EAGLE-3.1", (2, 4, 5))],
)
def test_variants(variant: str, name: str, aux: tuple[int, ...] | None) -> None:
    config = drafter_config(DrafterSection(variant=variant), TINY_TARGET)
    assert name_of(config) == name
    assert config.aux_layer_ids == aux
    assert config.own_head == (variant != "eagle1")


def test_a_recipe_overrides_its_variant() -> None:
    section = DrafterSection(
        variant="eagle3",
        norm_output=True,
        norm_before_residual=True,
        num_layers=2,
        intermediate_size=64,
        num_heads=8,
        num_kv_heads=4,
        head_dim=4,
        sliding_window=32,
        aux_layer_ids=(1, 4, 6, 8),
        train_embedding=True,
    )
    config = drafter_config(section, TINY_TARGET, 16)
    assert (config.fc_norm, config.norm_output, config.norm_before_residual) == (False, True, True)
    assert (config.num_layers, config.num_aux_states, config.aux_layer_ids) == (2, 4, (1, 4, 6, 8))
    layer = config.layer
    assert (layer.intermediate_size, layer.num_heads, layer.num_kv_heads, layer.head_dim) == (64, 8, 4, 4)
    assert (config.draft_vocab_size, config.own_embedding, config.sliding_windows) == (16, True, (32, 32))


def test_rope_and_positions_follow_the_target() -> None:
    """Mistakes 6 and 7."""
    rope = RopeConfig(type="llama3", theta=5e5, factor=8.0, original_max_positions=64)
    target = replace(TINY_TARGET, layer=replace(TINY_TARGET.layer, rope=rope), max_positions=4096)
    config = drafter_config(DrafterSection(), target)
    assert config.layer.rope == rope
    assert config.max_positions == 4096
    with pytest.warns(CheckpointWarning, match=r"drafter\.max_positions is 2048, less than the target's 4096"):
        assert drafter_config(DrafterSection(max_positions=2048), target).max_positions == 2048


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama-biases"])
def test_the_layer_is_the_plain_one_that_all_engines_have(name: str) -> None:
    layer = drafter_config(DrafterSection(), TARGET_CONFIGS[name]).layer
    assert [layer.qk_norm, layer.qkv_bias, layer.output_bias, layer.mlp_bias] == [False] * 4


def test_a_latent_layer_is_the_target_s_with_queries_in_two_steps() -> None:
    for name, rank in (("kimi-k2", 10), ("deepseek-v2", 48)):
        target = TARGET_CONFIGS[name].layer
        layer = drafter_config(DrafterSection(attention="mla", intermediate_size=64), TARGET_CONFIGS[name]).layer
        assert target.latent is not None
        assert layer.latent == replace(target.latent, q_lora_rank=rank)
        assert (layer.experts, layer.rope.interleaved, layer.intermediate_size) == (None, True, 64)
        assert (layer.head_dim, layer.num_kv_heads) == (target.latent.qk_rope_head_dim, target.num_heads)


@pytest.mark.parametrize(
    ("section", "target", "size", "message"),
    [
        (DrafterSection(variant="eagle1"), TINY_TARGET, 20, "vocab.size: EAGLE-1 drafts with the target's own head"),
        (DrafterSection(variant="eagle1", fc_norm=True), TINY_TARGET, None, "are of EAGLE-3"),
        (DrafterSection(num_heads=4, num_kv_heads=3), TINY_TARGET, None, "num_kv_heads: found 3"),
        (DrafterSection(head_dim=7), TINY_TARGET, None, "head_dim: found 7, allowed is an even number"),
        (
            DrafterSection(attention="mla"),
            TINY_TARGET,
            None,
            "attention: mla takes its shape from the target, and llama",
        ),
        (DrafterSection(attention="mla", variant="eagle1"), TARGET_CONFIGS["kimi-k2"], None, "mla is of EAGLE-3"),
        (DrafterSection(attention="mla", head_dim=8), TARGET_CONFIGS["kimi-k2"], None, "head_dim: found 8, allowed is"),
        (DrafterSection(attention="mla", sliding_window=9), TARGET_CONFIGS["kimi-k2"], None, "sliding_window: found 9"),
        (DrafterSection(aux_layer_ids=(2, 9)), TINY_TARGET, None, "found [2, 9], allowed are ascending"),
        (DrafterSection(aux_layer_ids=(4, 2)), TINY_TARGET, None, "found [4, 2], allowed are ascending"),
        (
            DrafterSection(),
            replace(TINY_TARGET, num_layers=4),
            None,
            "the usual ones do not suit this target: [2, 2, 1]",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    section: DrafterSection, target: TargetConfig, size: int | None, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        drafter_config(section, target, size)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_start_from_the_target_and_a_seed(capture: FledgeCapture) -> None:
    draft = vocabulary()
    drafter = setup(DrafterSection(), capture, draft)
    assert drafter.lm_head is not None
    torch.testing.assert_close(drafter.lm_head.weight.detach(), capture.ends.head_weight[IDS], atol=0, rtol=0)
    assert drafter.vocabulary is not None
    assert torch.equal(drafter.vocabulary.target_ids, IDS)
    again, other = setup(DrafterSection(), capture, draft), setup(DrafterSection(), capture, draft, seed=1)
    for (name, a), b, c in zip(drafter.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert a.dtype == torch.float32
        assert a.requires_grad
        assert torch.equal(a, b), name
        assert a.dim() == 1 or "lm_head" in name or not torch.equal(a, c), name
    fresh = setup(DrafterSection(head_from_target=False), capture, draft)
    assert fresh.lm_head is not None
    assert not torch.equal(fresh.lm_head.weight, drafter.lm_head.weight)


def test_states_keep_their_size_at_the_start(capture: FledgeCapture) -> None:

    drafter, batch = setup(DrafterSection(), capture), packed([[30]], 30)
    feature = drafter.fuse(capture.states(batch, drafter.aux_layer_ids))
    assert 0.7 < feature.square().mean().sqrt() < 1.4
    out = drafter(batch.tokens, feature, batch.positions, TttStorage(DocumentLayout(batch)))
    assert 0.7 < out.head.square().mean().sqrt() < 1.4


@pytest.mark.parametrize("variant", ["eagle1", "eagle3.1"])
def test_what_is_borrowed_is_neither_trained_nor_saved(capture: FledgeCapture, variant: str, tmp_path: Path) -> None:
    drafter = setup(DrafterSection(variant=variant), capture)
    assert drafter.embed_tokens is not None
    assert drafter.embed_tokens.weight.data_ptr() == capture.ends.embedding_weight.data_ptr()
    names = {name for name, _ in drafter.named_parameters()} | set(drafter.state_dict())
    assert not any(name.startswith("embed_tokens") for name in names)
    assert any(name.startswith("lm_head") for name in names) == (variant != "eagle1")
    save_drafter(drafter, tmp_path / "drafter")
    checkpoint = read_drafter(tmp_path / "drafter")
    assert not checkpoint.config.own_embedding
    assert check(checkpoint, capture.config) == []
    loaded = load_drafter(tmp_path / "drafter", capture.model)
    tokens = torch.arange(5)
    torch.testing.assert_close(loaded.embed(tokens), drafter.embed(tokens))
    torch.testing.assert_close(loaded.logits(loaded.embed(tokens)), drafter.logits(drafter.embed(tokens)))


def test_an_embedding_of_its_own_is_a_trained_copy(capture: FledgeCapture) -> None:
    drafter = setup(DrafterSection(train_embedding=True), capture)
    weight = dict(drafter.named_parameters())["embed_tokens.weight"]
    assert torch.equal(weight, capture.ends.embedding_weight)
    assert weight.data_ptr() != capture.ends.embedding_weight.data_ptr()


def test_going_on_from_a_checkpoint_with_another_vocabulary(capture: FledgeCapture, tmp_path: Path) -> None:
    earlier = setup(DrafterSection(head_from_target=False), capture, vocabulary(), seed=9)
    save_drafter(earlier, tmp_path / "earlier")
    ids = torch.arange(10, 35)
    draft = DraftVocabulary.from_target_ids(ids, TINY_TARGET.vocab_size)
    drafter = setup(DrafterSection(init_from=str(tmp_path / "earlier")), capture, draft)
    theirs = dict(earlier.named_parameters())
    for name, parameter in drafter.named_parameters():
        if name != "lm_head.weight":
            assert torch.equal(parameter, theirs[name]), name
    assert drafter.lm_head is not None
    assert earlier.lm_head is not None
    assert torch.equal(drafter.lm_head.weight[:17], earlier.lm_head.weight[7:24])  # tokens 10 to 26, in both
    assert torch.equal(drafter.lm_head.weight[17:].detach(), capture.ends.head_weight[27:35])


def test_going_on_with_a_window(capture: FledgeCapture, tmp_path: Path) -> None:
    earlier = setup(DrafterSection(), capture, seed=9)
    save_drafter(earlier, tmp_path / "earlier")
    drafter = setup(DrafterSection(init_from=str(tmp_path / "earlier"), sliding_window=32), capture)
    assert drafter.config.sliding_windows == (32,)
    theirs = dict(earlier.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in drafter.named_parameters())


def test_a_checkpoint_of_another_shape_is_refused(capture: FledgeCapture, tmp_path: Path) -> None:
    save_drafter(setup(DrafterSection(variant="eagle3"), capture), tmp_path / "earlier")
    with pytest.raises(ConfigError, match="has fc_norm False, but the recipe asks for True"):
        setup(DrafterSection(init_from=str(tmp_path / "earlier")), capture)


def test_targets_of_families_that_we_do_not_serve(capture: FledgeCapture, tmp_path: Path) -> None:
    save_drafter(setup(DrafterSection(), capture), tmp_path / "earlier")
    section = DrafterSection(init_from=str(tmp_path / "earlier"))
    foreign = replace(capture.config, family="gemma")
    config: DrafterConfig = drafter_config(section, foreign)
    make_drafter(section, config, foreign, capture.ends, None, device="cpu", seed=0)
