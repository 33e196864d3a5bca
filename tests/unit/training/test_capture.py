"""Hidden states: our own targets against transformers, and families that we do not serve.

Tolerance 1e-4 in float32 for another order of summation; a wrong layer, norm or mask is off by 0.1 and more.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GemmaConfig, GPT2Config, GPTNeoXConfig, GraniteConfig

from fledge.checkpoints.target import (
    describe_quantization,
    load_target,
    read_rope_with_fallback,
    save_target,
)
from fledge.errors import CheckpointError, CheckpointWarning
from fledge.models.hf_config import ConfigFields
from fledge.models.target.decoder import TargetStates
from fledge.training.capture import FledgeCapture, TargetEnds, TransformersCapture, open_target, target_config
from fledge.training.data.examples import PackedBatch
from fledge.training.recipe import TargetSection
from tests.fit_cases import TARGET, packed
from tests.quantized_checkpoints import FORMATS, quantize_checkpoint
from tests.tiny_models import TARGET_CONFIGS, make_target

TOLERANCE = 1e-4
VOCAB = TARGET.vocab_size


def assert_same(found: TargetStates, expected: TargetStates, batch: PackedBatch) -> None:
    real = batch.document >= 0
    for name in ("final", "aux"):
        torch.testing.assert_close(
            getattr(found, name)[real], getattr(expected, name)[real], atol=TOLERANCE, rtol=TOLERANCE
        )


@pytest.mark.parametrize("name", ["llama3-tied", "mistral", "qwen2", "qwen3", "granite"])
def test_both_backends_give_the_same_states(name: str, tmp_path: Path) -> None:
    save_target(make_target(TARGET_CONFIGS[name]), tmp_path / "target")
    section = TargetSection(path=str(tmp_path / "target"))
    ours = open_target(section, "cpu")
    theirs = open_target(replace(section, backend="transformers"), "cpu")
    assert isinstance(ours, FledgeCapture)
    assert isinstance(theirs, TransformersCapture)
    assert ours.config == theirs.config
    batch, ids = packed([[9, 1, 7], [17], [3, 3, 3, 2]], 20), (0, 2, 5, 8)
    assert_same(theirs.states(batch, ids), ours.states(batch, ids), batch)
    torch.testing.assert_close(theirs.ends.head_weight, ours.ends.head_weight)
    torch.testing.assert_close(theirs.ends.embedding_weight, ours.ends.embedding_weight)
    assert ours.states(batch, ()).aux is None
    assert theirs.states(batch, ()).aux is None


def test_a_quantised_target_has_the_states_of_what_it_means(tmp_path: Path) -> None:
    save_target(make_target(TARGET_CONFIGS["qwen3"]), tmp_path / "target")
    quantize_checkpoint(tmp_path / "target", tmp_path / "stored", tmp_path / "meant", FORMATS["ct-int8"])
    found, meant = (open_target(TargetSection(path=str(tmp_path / name)), "cpu") for name in ("stored", "meant"))
    batch = packed([[9, 1, 7], [17], [3, 3, 3, 2]], 20)
    assert_same(found.states(batch, (0, 2, 5)), meant.states(batch, (0, 2, 5)), batch)
    assert describe_quantization(tmp_path / "stored") == "compressed-tensors, 8-bit integers, one scale per row"
    assert describe_quantization(tmp_path / "meant") is None


def test_documents_do_not_see_each_other() -> None:
    """Packed with others, a document has the states it has alone."""
    capture = FledgeCapture(make_target())
    batch = packed([[6, 9]], 16)
    whole = capture.states(batch, (2, 4, 5))
    alone = PackedBatch(**{name: getattr(batch, name)[:, 6:15] for name in batch.__dataclass_fields__})
    found, expected = whole.aux[:, 6:15], capture.states(alone, (2, 4, 5)).aux
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_aux_ids_are_inputs_and_the_final_state_is_normed(tmp_path: Path) -> None:
    """Mistakes 4 and 5: against the hidden states that transformers itself hands out."""
    save_target(make_target(TARGET_CONFIGS["qwen3"]), tmp_path / "target")
    section = TargetSection(path=str(tmp_path / "target"), backend="transformers")
    batch = packed([[12]], 12)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    with torch.no_grad():
        reference = model(batch.tokens, output_hidden_states=True)
    for backend in ("fledge", "transformers"):
        capture = open_target(replace(section, backend=backend), "cpu")
        states = capture.states(batch, (2, 5))
        expected = torch.cat([reference.hidden_states[2], reference.hidden_states[5]], dim=-1)
        torch.testing.assert_close(states.aux, expected, atol=TOLERANCE, rtol=TOLERANCE)
        logits = states.final @ capture.ends.head_weight.T
        torch.testing.assert_close(logits, reference.logits, atol=TOLERANCE, rtol=TOLERANCE)


SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4}
FOREIGN = {
    "gemma": GemmaConfig(**SHAPE, num_key_value_heads=1, head_dim=16, intermediate_size=48, rope_theta=2e5),
    "gpt_neox": GPTNeoXConfig(**SHAPE, intermediate_size=64, max_position_embeddings=128, tie_word_embeddings=False),
    "granite": GraniteConfig(**SHAPE, num_key_value_heads=2, intermediate_size=48, logits_scaling=4.0),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=6, n_head=4, n_positions=64),
}


def save_foreign(config: object, directory: Path) -> TargetSection:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return TargetSection(path=str(directory), dtype="float32")


@pytest.mark.parametrize("name", FOREIGN)
def test_any_family_can_be_captured(name: str, tmp_path: Path) -> None:
    section = save_foreign(FOREIGN[name], tmp_path)
    capture = open_target(section, "cpu")
    batch = packed([[5, 8], [13]], 15)
    states = capture.states(batch, (1, 3, 6))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        reference = model(batch.tokens[:, 5:13][:1], output_hidden_states=True)
    aux = states.aux[0, 5:13].unflatten(-1, (3, -1))
    torch.testing.assert_close(aux[:, 0], reference.hidden_states[1][0], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(aux[:, 1], reference.hidden_states[3][0], atol=TOLERANCE, rtol=TOLERANCE)
    logits = states.final[0, 5:13] @ capture.ends.head_weight.T
    torch.testing.assert_close(logits, reference.logits[0], atol=2e-4, rtol=1e-3)


def test_the_shape_of_a_foreign_family(tmp_path: Path) -> None:
    """Mistake 7: transformers 5 writes rope_theta into rope_parameters."""
    config = target_config(save_foreign(FOREIGN["gemma"], tmp_path))
    assert '"rope_theta": 200000.0' in (tmp_path / "config.json").read_text().split("rope_parameters")[1]
    layer = config.layer
    assert (config.family, config.num_layers, config.vocab_size) == ("gemma", 6, VOCAB)
    assert (layer.hidden_size, layer.num_heads, layer.num_kv_heads, layer.head_dim) == (32, 4, 1, 16)
    assert layer.intermediate_size == 48
    assert layer.rope.theta == 2e5


def test_rope_that_differs_by_kind_of_layer(tmp_path: Path) -> None:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        **SHAPE,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert target_config(save_foreign(config, tmp_path)).layer.rope.theta == 1e6


def test_rope_scaling_of_an_unknown_kind_keeps_its_theta() -> None:
    values = {"rope_parameters": {"rope_type": "proportional", "factor": 2.0, "rope_theta": 7e4}}
    with pytest.warns(CheckpointWarning, match="proportional"):
        assert read_rope_with_fallback(ConfigFields(values, "config.json")).theta == 7e4


def test_soft_capped_logits_are_refused(tmp_path: Path) -> None:
    config = Gemma2Config(
        **SHAPE, num_key_value_heads=1, head_dim=16, intermediate_size=48, final_logit_softcapping=2.0
    )
    section = save_foreign(config, tmp_path)
    for backend in ("fledge", "transformers"):
        with pytest.raises(CheckpointError, match=r"not a linear function .* \(final_logit_softcapping 2.0\)") as error:
            open_target(replace(section, backend=backend), "cpu")
        assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match="not a linear function"):  # as captured from vLLM
        TargetEnds.of(load_target(tmp_path, ends_only=True))


def test_scaled_logits_are_part_of_the_head(tmp_path: Path) -> None:
    section = save_foreign(FOREIGN["granite"], tmp_path)
    for backend, kind in (("fledge", FledgeCapture), ("transformers", TransformersCapture)):
        capture = open_target(replace(section, backend=backend), "cpu")
        assert isinstance(capture, kind)
        torch.testing.assert_close(capture.ends.head_weight, capture.model.lm_head.weight / 4.0, atol=1e-5, rtol=1e-4)


def test_a_foreign_family_is_not_ours(tmp_path: Path) -> None:
    section = save_foreign(FOREIGN["gemma"], tmp_path)
    with pytest.raises(CheckpointError, match=r"gemma.*set target\.backend"):
        open_target(replace(section, backend="fledge"), "cpu")
