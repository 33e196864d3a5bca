"""`fledge convert --quantize`: what it writes, says of it and refuses; and what calibration is told."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import load_target, save_target
from fledge.evaluation.quantization import mean_squared_inputs
from fledge.evaluation.workloads import load_workload, tokenised
from fledge.models.drafter.variants import EAGLE_3_1
from tests.checkpoint_fixtures import make_drafter
from tests.command_line import fledge
from tests.tiny_models import TINY_TARGET, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

CONFIG = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, max_positions=256)


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_target(make_target(CONFIG), root / "target")
    save_tokenizer(root / "target")
    save_drafter(make_drafter(EAGLE_3_1.config_for(CONFIG)), root / "drafter")
    wider = replace(CONFIG, layer=replace(CONFIG.layer, hidden_size=64))
    save_drafter(make_drafter(EAGLE_3_1.config_for(wider)), root / "stranger")
    texts = ("abc", "hello there", "one more", "and the last")
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
    (root / "prompts.jsonl").write_text("\n".join(lines))
    return root


def test_the_first_layer_is_told_its_normed_embeddings(models: Path) -> None:
    workload = load_workload(models / "prompts.jsonl")
    found = mean_squared_inputs(str(models / "target"), [workload])
    target = load_target(models / "target", dtype=torch.float32)
    ids = torch.tensor([token for one in tokenised(workload, models / "target") for token in one])
    with torch.no_grad():
        normed = target.layers[0].input_layernorm(target.embed_tokens(ids))
    torch.testing.assert_close(found["layers.0.self_attn.qkv_proj"], normed.square().mean(0))
    assert found["layers.1.mlp.down_proj"].shape == (CONFIG.layer.intermediate_size,)


def test_a_target_is_written_and_measured_with_its_drafter(models: Path) -> None:
    options = ("--calibrate", "prompts.jsonl", "--workload", "prompts.jsonl", "--drafter", "drafter", "--json")
    told = json.loads(fledge("convert", "target", "int8", "--quantize", "int8", *options, cwd=models).stdout)
    assert told["calibrated"] == told["linears"] > 0
    assert told["before"]["prompts"] == told["after"]["prompts"] == 3  # of each set
    assert told["before"]["unchanged"] is told["after"]["unchanged"] is True
    change = told["change"]["perplexity"]
    assert change["value"] == pytest.approx(told["after"]["perplexity"] / told["before"]["perplexity"])
    assert change["low"] <= change["value"] <= change["high"]
    assert (
        "wrote small (int8: 7 linears" in fledge("convert", "drafter", "small", "--quantize", "int8", cwd=models).stdout
    )


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("target", ("--quantize", "fp8", "--calibrate", "mt_bench"), "fp8 has no scales to choose"),
        ("drafter", ("--quantize", "int8", "--calibrate", "mt_bench"), "--drafter and --calibrate are for targets"),
        ("target", ("--quantize", "int8", "--target", "target"), "--target is for drafters"),
        ("drafter", ("--to", "vllm", "--calibrate", "mt_bench"), "it needs --quantize"),
        ("drafter", ("--to", "vllm", "--drafter", "drafter"), "it needs --quantize"),
        ("target", ("--quantize", "int8", "--drafter", "nowhere"), "nowhere"),
        ("target", ("--quantize", "int8", "--drafter", "stranger"), "made for another target"),
        ("stranger", ("--quantize", "int8", "--target", "target"), "made for another target"),
    ],
)
def test_refusals(models: Path, source: str, options: tuple[str, ...], said: str) -> None:
    outcome = fledge("convert", source, "never", *options, cwd=models)
    assert outcome.returncode == 2
    assert said in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert not (models / "never").exists()


def test_one_prompt_gives_a_figure_and_no_interval(models: Path) -> None:
    (models / "one.jsonl").write_text((models / "prompts.jsonl").read_text().splitlines()[0])
    options = ("--quantize", "int8", "--workload", "one.jsonl", "--drafter", "drafter")
    said = fledge("convert", "target", "of-one", *options, cwd=models).stdout
    assert re.search(r"perplexity [\d.]+ -> [\d.]+ \([+-][\d.]+ %; one.jsonl: 1 prompt", said), said
    assert re.search(r"tokens a round, depth 3: [\d.]+ -> [\d.]+ \([+-][\d.]+\)", said), said
