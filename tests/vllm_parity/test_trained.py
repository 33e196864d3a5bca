"""A drafter made by `fledge train` is loaded by real vLLM as it is, which then decodes as Fledge does.

The whole way: plain text, the target's own continuations, a draft vocabulary, training, the published directory.
Greedy, float32, on the CPU. Run by `make test-vllm`.
"""

import json
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from fledge.checkpoints.target import save_target
from fledge.layers.config import ExpertsConfig, LatentConfig
from tests.command_line import fledge
from tests.tiny_models import make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from tests.vllm_parity.pairs import LLAMA, MAX_POSITIONS, PairDirectories
from tests.vllm_parity.small_training import Budget, train_target
from tests.vllm_parity.test_parity import (
    DECISIVE,
    MAX_TOKENS,
    VLLM_PYTHON,
    Answer,
    Request,
    Run,
    answer,
    first_difference,
    load_pair,
    narrowest_choice,
    pooled,
)

DEPTH = 3
PROMPTS = 3

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM_PYTHON is None, reason="FLEDGE_VLLM_PYTHON is not set (make test-vllm sets it)"),
    pytest.mark.filterwarnings("ignore::fledge.errors.CheckpointWarning"),
]


def sentences(count: int) -> list[str]:
    """Text in which the next word mostly follows from the last one."""
    generator = random.Random(0)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "and", "then"]
    lines = []
    for _ in range(count):
        place, line = generator.randrange(len(words)), []
        for _ in range(12):
            place = (place + (1 if generator.random() < 0.85 else generator.randrange(2, 6))) % len(words)
            line.append(words[place])
        lines.append(" ".join(line))
    return lines


def train(root: Path, lines: list[str], **sections: dict[str, object]) -> None:
    """Train a drafter for the target that is there, from a few lines of text. `sections` change the recipe."""
    (root / "data.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines), encoding="utf-8")
    recipe = {
        "output": "run",
        "target": {"path": "target"},
        "data": {"sources": ["data.jsonl"], "max_length": 96, "held_out": 2},
        "regenerate": {"max_tokens": 32},
        "vocab": {"size": 128},
        "drafter": {"variant": "eagle3.1"},
        "fit": {"depth": DEPTH, "length": 96, "rows": 8, "max_steps": 14, "lr": 1e-3, "candidates": 1},
        "eval": {"max_tokens": 16, "max_prompts": 2, "depths": [DEPTH]},
        "device": "cpu",
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump({**recipe, **sections}), encoding="utf-8")
    done = fledge("train", "recipe.yaml", cwd=root)
    assert done.returncode == 0, done.stderr


def train_pair(root: Path) -> tuple[PairDirectories, list[list[int]]]:
    """Train target and drafter. Returns where they are, and prompts as token ids."""
    directories = PairDirectories(target=root / "target", drafter=root / "run" / "drafter")
    lines = sentences(300)
    save_tokenizer(root / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(root / "tokenizer")
    text = torch.tensor(tokenizer.encode("\n".join(lines)))
    config = replace(LLAMA, vocab_size=VOCAB_SIZE)
    save_target(train_target(config, text, Budget(steps=220, rate=4e-3)), directories.target)
    save_tokenizer(directories.target)
    train(root, lines[:80])
    return directories, [tokenizer.encode(line)[:24] for line in lines[100:]]


def decode_with_vllm(root: Path, directories: PairDirectories, requests: list[Request]) -> dict[str, object]:
    job = {
        "max_tokens": MAX_TOKENS,
        "max_model_len": MAX_POSITIONS,
        "runs": [
            {
                "name": "trained",
                "target": str(directories.target),
                "drafter": str(directories.drafter),
                "method": "eagle3",
                "num_speculative_tokens": DEPTH,
                "requests": [vars(request) for request in requests],
            }
        ],
    }
    (root / "job.json").write_text(json.dumps(job), encoding="utf-8")
    script = Path(__file__).with_name("run_vllm.py")
    command = [str(VLLM_PYTHON), str(script), str(root / "job.json"), str(root / "result.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, object] = json.loads((root / "result.json").read_text(encoding="utf-8"))["trained"]
    return result


def test_vllm_loads_what_fledge_train_made_and_decodes_alike(tmp_path: Path) -> None:
    directories, prompts = train_pair(tmp_path)
    target, drafter = load_pair(directories)
    requests: list[Request] = []
    ours: list[Answer] = []
    for prompt in prompts:
        request = Request(prompt=tuple(prompt))
        with narrowest_choice(target, drafter) as narrowest:
            answered = answer(target, drafter, DEPTH, request)
        if min(narrowest) > DECISIVE:
            requests.append(request)
            ours.append(answered)
        if len(requests) == PROMPTS:
            break
    assert len(requests) == PROMPTS, "too few prompts on which every choice is decisive"
    statistics = pooled(ours)
    assert 0 < statistics.accepted_by_depth[0] < statistics.rounds, statistics.tally  # right and wrong sometimes

    theirs = decode_with_vllm(tmp_path, directories, requests)
    answers = [Answer(**values) for values in theirs["answers"]]  # type: ignore[attr-defined]
    run = Run(requests=requests, ours=ours, theirs=answers, their_totals=theirs["totals"])  # type: ignore[arg-type]
    assert first_difference(run) is None
    assert statistics.rounds == run.their_totals["drafts"]
    assert list(statistics.accepted_by_depth) == run.their_totals["accepted_tokens_per_pos"]


def test_vllm_loads_an_mla_drafter_that_fledge_train_made(tmp_path: Path) -> None:
    """And drafts with it. No more can be asked of this build: it does not rotate what it reads in a prompt."""
    latent = LatentConfig(q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32)
    experts = ExpertsConfig(
        num_experts=4, num_experts_per_token=2, intermediate_size=64, shared_size=64, scoring_func="sigmoid"
    )
    rope = replace(LLAMA.layer.rope, type="default", interleaved=True)
    layer = replace(LLAMA.layer, num_kv_heads=2, head_dim=64, rope=rope, latent=latent, experts=experts)
    kimi = replace(LLAMA, family="kimi_k2", layer=layer, num_layers=4, vocab_size=VOCAB_SIZE)
    directories = PairDirectories(target=tmp_path / "target", drafter=tmp_path / "run" / "drafter")
    save_target(make_target(kimi), directories.target)
    save_tokenizer(directories.target)
    drafter: dict[str, object] = {"attention": "mla", "aux_layer_ids": [1, 2, 3]}
    train(tmp_path, sentences(20), drafter=drafter, regenerate={"enabled": False})
    prompt = tuple(range(5, 20))
    theirs = decode_with_vllm(tmp_path, directories, [Request(prompt=prompt)])
    (found,) = (Answer(**values) for values in theirs["answers"])  # type: ignore[attr-defined]
    assert len(found.tokens) == MAX_TOKENS
    assert set(found.drafted[:-1]) == {DEPTH}
