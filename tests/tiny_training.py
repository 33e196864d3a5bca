"""A run of `fledge train` small enough for tests: a target with habits, a few conversations, a recipe."""

import functools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from fledge.checkpoints.target import save_target
from tests.command_line import fledge
from tests.tiny_models import TINY_LAYER, TINY_TARGET, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "tiny.yaml"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "red", "dog", "run", "far", "away"]
ROPE_THETA, MAX_POSITIONS = 31337.0, 192


def write_target(directory: Path) -> None:
    """A target whose next token follows from the last one alone: a drafter can learn it in a few steps."""
    layer = replace(TINY_LAYER, rope=replace(TINY_LAYER.rope, theta=ROPE_THETA))
    config = replace(
        TINY_TARGET, layer=layer, vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS, eos_ids=(VOCAB_SIZE - 1,)
    )
    target = make_target(config)
    with torch.no_grad():
        for block in target.layers:
            block.self_attn.o_proj.weight *= 0.01
            block.mlp.down_proj.weight *= 0.01
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


def write_run(directory: Path, **sections: dict[str, object]) -> Path:
    """Write target, data and recipe into a directory; return the recipe's path. `sections` change the recipe."""
    directory.mkdir(parents=True, exist_ok=True)
    write_target(directory / "target")
    write_data(directory / "data.jsonl")
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values}
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@functools.cache
def finished_run() -> Path:
    """The directory of a run of all stages that nothing disturbed; `result.json` and `stderr.txt` have what it said."""
    root = Path(tempfile.mkdtemp(prefix="fledge-run-"))
    done = fledge("train", str(write_run(root)), "--json", cwd=root)
    assert done.returncode == 0, done.stderr
    (root / "result.json").write_text(done.stdout)
    (root / "stderr.txt").write_text(done.stderr)
    return root


def fork_train(*arguments: str, cwd: Path) -> BaseProcess:
    """Start `fledge train` in a copy of this process, which has imported everything. What it said is in `said.txt`."""

    def work() -> None:
        done = fledge("train", *arguments, cwd=cwd)
        (cwd / "said.txt").write_text(done.stderr)
        os._exit(done.returncode)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def start_train(*arguments: str, processes: int = 1) -> subprocess.Popen[str]:
    """Start `fledge train` in processes of its own."""
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launch, "-m", "fledge", "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(*arguments: str, processes: int = 1, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    process = start_train(*arguments, processes=processes)
    stdout, stderr = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def weights(drafter: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(drafter / "model.safetensors")
    return tensors
