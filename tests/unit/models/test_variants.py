from dataclasses import replace

import pytest

from fledge.models.config import Architecture
from fledge.models.drafter.eagle import Eagle3Drafter, EagleDrafter
from fledge.models.drafter.variants import EAGLE_1, EAGLE_2, EAGLE_3, EAGLE_3_1, build, name_of
from tests.tiny_models import TINY_LAYER, TINY_TARGET

SWITCHES = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")


def test_eagle_3_1_is_eagle_3_with_two_switches() -> None:
    old, new = EAGLE_3.config_for(TINY_TARGET), EAGLE_3_1.config_for(TINY_TARGET)
    assert new == replace(old, fc_norm=True, norm_output=True)
    assert not any(getattr(old, switch) for switch in SWITCHES)
    assert old.own_head
    assert not old.own_embedding
    assert old.draft_vocab_size == old.vocab_size == TINY_TARGET.vocab_size


def test_eagle_2_is_eagle_1_with_trees() -> None:
    config = EAGLE_1.config_for(TINY_TARGET)
    assert EAGLE_2.config_for(TINY_TARGET) == config
    assert config.architecture is Architecture.EAGLE1
    assert config.aux_layer_ids is None
    assert not config.own_head  # the target's head reads its states


@pytest.mark.parametrize(("num_layers", "ids"), [(6, (2, 3, 3)), (32, (2, 16, 29)), (61, (2, 30, 58))])
def test_default_aux_layers(num_layers: int, ids: tuple[int, ...]) -> None:
    target = replace(TINY_TARGET, num_layers=num_layers)
    config = EAGLE_3.config_for(target)
    assert config.aux_layer_ids == ids
    assert replace(config, aux_layer_ids=None).resolved(target).aux_layer_ids == ids
    assert replace(config, aux_layer_ids=(1, 2, 3)).resolved(target).aux_layer_ids == (1, 2, 3)
    assert EAGLE_1.config_for(target).resolved(target).aux_layer_ids is None


def test_names() -> None:
    eagle3 = EAGLE_3.config_for(TINY_TARGET)
    assert name_of(EAGLE_1.config_for(TINY_TARGET)) == "EAGLE-1/2"
    assert name_of(eagle3) == "EAGLE-3"
    assert name_of(EAGLE_3_1.config_for(TINY_TARGET)) == "EAGLE-3.1"
    assert name_of(replace(eagle3, fc_norm=True)) == "EAGLE-3 + fc_norm"
    assert name_of(replace(eagle3, norm_output=True)) == "EAGLE-3 + norm_output"
    assert name_of(replace(eagle3, norm_before_residual=True, draft_vocab_size=8)) == "EAGLE-3"


def test_building() -> None:
    assert type(build(EAGLE_2.config_for(TINY_TARGET))) is EagleDrafter
    assert type(build(EAGLE_3_1.config_for(TINY_TARGET))) is Eagle3Drafter
    wide = replace(TINY_LAYER, intermediate_size=200)
    assert build(EAGLE_3.config_for(TINY_TARGET, layer=wide)).layers[0].mlp.down_proj.in_features == 200

    unresolved = build(replace(EAGLE_3.config_for(TINY_TARGET), aux_layer_ids=None))
    with pytest.raises(AssertionError, match="resolve"):
        _ = unresolved.aux_layer_ids
