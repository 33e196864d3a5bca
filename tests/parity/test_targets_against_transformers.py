"""Our targets against transformers: float32 logits and aux states within 1e-4, for prefill and cached decoding.

The tolerance leaves room for another order of summation in float32; a wrong mask, norm, bias or rotation is off by 0.1
and more with these weights.
"""

from pathlib import Path

import pytest
import torch
import transformers

from fledge.checkpoints.target import load_target, read_target_config, save_target
from fledge.files import read_json, write_json
from fledge.layers.dense_cache import DenseCache
from fledge.models.target import FAMILIES
from tests.tiny_models import TARGET_CONFIGS, make_target

TOLERANCE = 1e-4


@pytest.fixture(params=TARGET_CONFIGS, name="name")
def _name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(name="directory")
def _directory(name: str, tmp_path: Path) -> Path:
    save_target(make_target(TARGET_CONFIGS[name]), tmp_path / "target")
    return tmp_path / "target"


def test_config_survives_the_round_trip(name: str, directory: Path) -> None:
    assert read_target_config(directory) == TARGET_CONFIGS[name]


@torch.no_grad()
def test_logits_and_aux_states(directory: Path) -> None:
    ours = load_target(directory)
    architecture = getattr(transformers, FAMILIES[ours.config.family].architecture)
    known_as = architecture.config_class.model_type  # transformers knows no kimi_k2, but what it is
    write_json(directory / "config.json", read_json(directory / "config.json") | {"model_type": known_as})
    theirs = architecture.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.randint(0, ours.config.vocab_size, (40,))
    every_input = tuple(range(ours.config.num_layers))

    reference = theirs(tokens[None], output_hidden_states=True)
    expected_aux = torch.cat(reference.hidden_states[:-1], dim=-1)[0]  # the last entry is after the final norm

    positions = torch.arange(len(tokens))
    cache = DenseCache(ours.config.num_layers)
    whole = ours(tokens, positions, cache.extend(positions), every_input)
    torch.testing.assert_close(whole.aux, expected_aux, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(ours.logits(whole.final), reference.logits[0], atol=TOLERANCE, rtol=TOLERANCE)

    cache = DenseCache(ours.config.num_layers)
    for chunk in torch.split(positions, [17, 1, 1, 6, 1, 14]):
        part = ours(tokens[chunk], chunk, cache.extend(chunk), every_input)
        torch.testing.assert_close(part.aux, expected_aux[chunk], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(ours.logits(part.final), reference.logits[0, chunk], atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_the_last_aux_id_is_the_stream_before_the_final_norm() -> None:
    target = make_target()
    positions = torch.arange(7)
    cache = DenseCache(target.config.num_layers)
    states = target(positions, positions, cache.extend(positions), (target.config.num_layers,))
    torch.testing.assert_close(target.norm(states.aux), states.final)
