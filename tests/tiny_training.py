"""A run of `fledge train` small enough for tests: a target with habits, a few conversations, a recipe."""

import functools
import json
import random
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from torch.distributed import run as torch_run

from fledge.checkpoints.target import save_target
from fledge.models.config import TargetConfig
from tests.command_line import fledge
from tests.forking import ForkedCommand
from tests.ports import free_port
from tests.shared_directory import shared_directory
from tests.tiny_models import TINY_TARGET, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "tiny.yaml"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "red", "dog", "run", "far", "away"]
ROPE_THETA, MAX_POSITIONS = 31337.0, 192


def write_target(directory: Path, like: TargetConfig = TINY_TARGET) -> None:
    """A target whose next token follows from the last one alone: a drafter can learn it in a few steps."""
    layer = replace(like.layer, rope=replace(like.layer.rope, theta=ROPE_THETA))
    config = replace(like, layer=layer, vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS, eos_ids=(VOCAB_SIZE - 1,))
    target = make_target(config)
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.01)
    save_target(target, directory)
    save_tokenizer(directory)


def write_data(path: Path, conversations: int = 24) -> None:
    generator = random.Random(0)
    lines = []
    for number in range(conversations):
        text = " ".join(generator.choices(WORDS, k=generator.randint(2, 5)))
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": f"yes {text}"}]
        lines.append(json.dumps({"category": "ab"[number % 2], "messages": messages}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_run(directory: Path, *, like: TargetConfig = TINY_TARGET, **sections: dict[str, object]) -> Path:
    """Write target, data and recipe into a directory; return the recipe's path. `sections` change the recipe."""
    directory.mkdir(parents=True, exist_ok=True)
    write_target(directory / "target", like)
    write_data(directory / "data.jsonl")
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values}
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@functools.cache
def finished_run() -> Path:
    """The directory of a run of all stages that nothing disturbed; `result.json` and `stderr.txt` have what it said.

    Its drafter has a sliding window, shorter than the conversations are.
    """
    root = shared_directory("run")
    done = fledge("train", str(write_run(root, drafter={"sliding_window": 6})), "--json", cwd=root)
    assert done.returncode == 0, done.stderr
    (root / "result.json").write_text(done.stdout)
    (root / "stderr.txt").write_text(done.stderr)
    return root


def fork_ranks(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `fledge train` in two processes, as torchrun would start them; what both said is one after the other's."""
    port = free_port()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        ForkedCommand("train", *arguments, cwd=cwd, environment={**shared, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.005)
    for rank in ranks:
        rank.terminate()  # those that are left when one has failed, as torchrun does
    said = [rank.communicate(timeout=60) for rank in ranks]
    status = max(abs(rank.returncode or 0) for rank in ranks)
    return subprocess.CompletedProcess(arguments, status, *("".join(texts) for texts in zip(*said, strict=True)))


def torchrun(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `torchrun -m fledge train`, whose two processes start from nothing."""
    words = ["--standalone", "--nproc-per-node", "2", "-m", "fledge", "train", *arguments]
    launcher = ForkedCommand(*words, cwd=cwd, environment={"OMP_NUM_THREADS": "1"}, program=torch_run.main)
    said = launcher.communicate(timeout=300)
    return subprocess.CompletedProcess(arguments, launcher.returncode or 0, *said)


def weights(drafter: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(drafter / "model.safetensors")
    return tensors
