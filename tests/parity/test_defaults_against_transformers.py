"""Fields that a config leaves out mean what they mean to transformers, or are asked for: never something else."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import transformers

from fledge.checkpoints.target import hf_config
from fledge.errors import CheckpointError
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields
from fledge.models.target import FAMILIES
from tests.tiny_models import TARGET_CONFIGS

# What answers begin and end with is no part of the model, nor what it is stored in.
NOT_OF_THE_MODEL = {"bos_token_id", "eos_token_id", "pad_token_id", "dtype"}
FIRST_OF_FAMILY = {config.family: name for name, config in reversed(TARGET_CONFIGS.items())}
ALIASES = [(name, FIRST_OF_FAMILY[family]) for family, one in FAMILIES.items() for name in one.aliases]
# That transformers has as a language model of its own, not as a whole with another inside.
TEXT_ALIASES = [(name, like) for name, like in ALIASES if name.endswith("_text")]


def read(family: str, values: dict[str, Any]) -> TargetConfig | str:
    try:
        return FAMILIES[family].config_from_hf(ConfigFields(values, "config.json"))
    except CheckpointError as error:
        return str(error)


def defaults_of(config_class: type[Any]) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config_class):
        if field.default is not dataclasses.MISSING and field.name not in NOT_OF_THE_MODEL:
            yield field.name, field.default
    theta = config_class.default_theta
    yield "rope_theta", theta["global"] if isinstance(theta, dict) else theta


@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize(("model_type", "name"), [*((c.family, n) for n, c in TARGET_CONFIGS.items()), *TEXT_ALIASES])
def test_what_is_left_out_is_the_default_or_asked_for(model_type: str, name: str, has_windows: bool) -> None:
    family = TARGET_CONFIGS[name].family
    architecture = getattr(transformers, FAMILIES[family].architecture)
    is_known = model_type in transformers.CONFIG_MAPPING  # kimi_k2 is not
    known = transformers.CONFIG_MAPPING[model_type] if is_known else architecture.config_class
    # A rope that is scaled or not at all; what transformers takes one for that is not named: below.
    values = {"rope_scaling": {"rope_type": "default"}, **hf_config(TARGET_CONFIGS[name], "torch.float32")}
    values |= {"model_type": model_type, **({"use_sliding_window": True} if has_windows else {})}
    assert isinstance(read(family, values), TargetConfig)
    for field, default in defaults_of(known):
        if model_type != family and field == "tie_word_embeddings":
            continue  # of a wrapper that is said of the whole
        if model_type == "ministral3" and field == "rope_theta":
            continue  # its default is part of the whole rope's
        without = {other: value for other, value in values.items() if other != field}
        found = read(family, without)
        if not (isinstance(found, str) and "required field" in found):
            assert found == read(family, {**without, field: default}), f"{model_type} without {field}"


@pytest.mark.parametrize("name", ["ministral3", "gpt-oss"])
def test_a_rope_that_no_field_speaks_of(name: str) -> None:
    """Two families have a scaled one then."""
    config = TARGET_CONFIGS[name]
    values = hf_config(config, "torch.float32")
    silent = {field: value for field, value in values.items() if not field.startswith("rope_")}
    architecture = getattr(transformers, FAMILIES[config.family].architecture)
    said = architecture.config_class(max_position_embeddings=config.max_positions).rope_parameters
    found = read(config.family, silent)
    assert isinstance(found, TargetConfig)
    assert found == read(config.family, {**silent, "rope_parameters": said})
    assert found.layer.rope.type == "yarn"
    assert (found.layer.temperature is not None) == (name == "ministral3")
