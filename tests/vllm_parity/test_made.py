"""Real vLLM loads what Fledge makes as it is: drafters of `fledge train`, an enlarged pair; and decodes as Fledge does.

Of `fledge train` the whole way: plain text, the target's own continuations, a draft vocabulary, training, the published
directory. Greedy, float32, on the CPU. Run by `make test-vllm`.
"""

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from fledge.bench.inflate_files import Inflation, write_inflated
from fledge.checkpoints.target import save_target
from fledge.layers.config import ExpertsConfig, LatentConfig
from tests.command_line import fledge
from tests.tiny_models import make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from tests.vllm_parity.pairs import CASES, LLAMA, MAX_POSITIONS, Case, PairDirectories, make_pairs
from tests.vllm_parity.small_training import Budget, train_target
from tests.vllm_parity.test_parity import (
    DECISIVE,
    MAX_TOKENS,
    VLLM_PYTHON,
    Answer,
    Request,
    Run,
    answer,
    decisive_answers,
    first_difference,
    load_pair,
    narrowest_choice,
    pooled,
)

DEPTH = 3
PROMPTS = 3
SMALL = [case for case in CASES if case.name in ("eagle3", "reduced-vocabulary")]  # the second one is 3.1
# Wider, deeper, with a repeated KV head (groups of one), heads twice as wide and a larger vocabulary.
SHAPE = replace(
    LLAMA,
    layer=replace(LLAMA.layer, hidden_size=160, intermediate_size=192, num_heads=4, num_kv_heads=4, head_dim=64),
    num_layers=10,
    vocab_size=320,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM_PYTHON is None, reason="FLEDGE_VLLM_PYTHON is not set (make test-vllm sets it)"),
    pytest.mark.filterwarnings("ignore::fledge.errors.CheckpointWarning"),
]


@dataclass(frozen=True, kw_only=True)
class Made:
    """A pair for vLLM, what it is asked, and what we answer (nothing where only theirs is looked at)."""

    directories: PairDirectories
    answers: dict[Request, Answer | None]

    def run(self, theirs: dict[str, Any]) -> Run:
        ours = [one for one in self.answers.values() if one is not None]
        answers = [Answer(**values) for values in theirs["answers"]]
        return Run(requests=list(self.answers), ours=ours, theirs=answers, their_totals=theirs["totals"])


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All pairs, by name. While some are trained, a process of vLLM's decodes the others."""
    root: Path = tmp_path_factory.mktemp("made")
    with ExitStack() as started:
        inflated = inflate(root / "inflated")
        asked = [(inflated, started.enter_context(_asked_of_vllm(root / "inflated", inflated)))]
        trained = {"trained": train_pair(root / "trained"), "mla": train_mla_pair(root / "mla")}
        asked.append((trained, started.enter_context(_asked_of_vllm(root / "trained", trained))))
        answered = [(made, answers()) for made, answers in asked]
    return {name: one.run(answers[name]) for made, answers in answered for name, one in made.items()}


@contextmanager
def _asked_of_vllm(root: Path, made: dict[str, Made]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Let a process of vLLM's decode pairs; yield what waits for its answers, by name."""
    job = {
        "max_tokens": MAX_TOKENS,
        "max_model_len": MAX_POSITIONS,
        "runs": [
            {
                "name": name,
                "target": str(one.directories.target),
                "drafter": str(one.directories.drafter),
                "method": "eagle3",
                "num_speculative_tokens": DEPTH,
                "requests": [vars(request) for request in one.answers],
            }
            for name, one in made.items()
        ],
    }
    (root / "job.json").write_text(json.dumps(job), encoding="utf-8")
    script = Path(__file__).with_name("run_vllm.py")
    command = [str(VLLM_PYTHON), str(script), str(root / "job.json"), str(root / "result.json")]
    with (root / "vllm.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def answers() -> dict[str, Any]:
        assert process.wait(timeout=540) == 0, (root / "vllm.log").read_text()[-6000:]
        return dict(json.loads((root / "result.json").read_text(encoding="utf-8")))

    try:
        yield answers
    finally:
        process.kill()  # nothing to do for one that has ended
        process.wait()


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


def train_pair(root: Path) -> Made:
    """Train target and drafter. Our answers are those to prompts on which every choice is decisive."""
    directories = PairDirectories(target=root / "target", drafter=root / "run" / "drafter")
    lines = sentences(300)
    save_tokenizer(root / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(root / "tokenizer")
    text = torch.tensor(tokenizer.encode("\n".join(lines)))
    config = replace(LLAMA, vocab_size=VOCAB_SIZE)
    save_target(train_target(config, text, Budget(steps=220, rate=4e-3)), directories.target)
    save_tokenizer(directories.target)
    train(root, lines[:80])
    target, drafter = load_pair(directories)
    answers: dict[Request, Answer | None] = {}
    for line in lines[100:]:
        request = Request(prompt=tuple(tokenizer.encode(line)[:24]))
        with narrowest_choice(target, drafter) as narrowest:
            answered = answer(target, drafter, DEPTH, request)
        if min(narrowest) > DECISIVE:
            answers[request] = answered
        if len(answers) == PROMPTS:
            break
    assert len(answers) == PROMPTS, "too few prompts on which every choice is decisive"
    return Made(directories=directories, answers=answers)


def train_mla_pair(root: Path) -> Made:
    latent = LatentConfig(q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32)
    experts = ExpertsConfig(
        num_experts=4, num_experts_per_token=2, intermediate_size=64, shared_size=64, scoring_func="sigmoid"
    )
    rope = replace(LLAMA.layer.rope, type="default", interleaved=True)
    layer = replace(LLAMA.layer, num_kv_heads=2, head_dim=64, rope=rope, latent=latent, experts=experts)
    kimi = replace(LLAMA, family="kimi_k2", layer=layer, num_layers=4, vocab_size=VOCAB_SIZE)
    directories = PairDirectories(target=root / "target", drafter=root / "run" / "drafter")
    save_target(make_target(kimi), directories.target)
    save_tokenizer(directories.target)
    drafter: dict[str, object] = {"attention": "mla", "aux_layer_ids": [1, 2, 3]}
    train(root, sentences(20), drafter=drafter, regenerate={"enabled": False})
    return Made(directories=directories, answers={Request(prompt=tuple(range(5, 20))): None})


def inflate(root: Path) -> dict[str, Made]:
    """Enlarged pairs, with our answers by the small ones."""
    small = make_pairs(SMALL)
    large = {name: PairDirectories(target=root / "large", drafter=root / f"large-{name}") for name in small}
    write_inflated(
        Inflation(
            source=str(small["eagle3"].target),
            destination=root / "large",
            shape_name="small test",
            shape=SHAPE,
            drafters=tuple((str(small[name].drafter), large[name].drafter) for name in small),
        )
    )
    return {
        f"large-{name}": Made(directories=large[name], answers={**decisive_answers(*load_pair(pair), DEPTH)})
        for name, pair in small.items()
    }


def test_vllm_loads_what_fledge_train_made_and_decodes_alike(runs: dict[str, Run]) -> None:
    run = runs["trained"]
    statistics = pooled(run.ours)
    assert 0 < statistics.accepted_by_depth[0] < statistics.rounds, statistics.tally  # right and wrong sometimes
    assert first_difference(run) is None
    assert statistics.rounds == run.their_totals["drafts"]
    assert list(statistics.accepted_by_depth) == run.their_totals["accepted_tokens_per_pos"]


def test_vllm_loads_an_mla_drafter_that_fledge_train_made(runs: dict[str, Run]) -> None:
    """And drafts with it. No more can be asked of this build: it does not rotate what it reads in a prompt."""
    (found,) = runs["mla"].theirs
    assert len(found.tokens) == MAX_TOKENS
    assert set(found.drafted[:-1]) == {DEPTH}


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_vllm_gives_the_small_pairs_tokens_in_the_small_pairs_rounds(runs: dict[str, Run], case: Case) -> None:
    run = runs[f"large-{case.name}"]
    assert first_difference(run) is None
    assert any(any(answer.accepted) for answer in run.theirs), "a drafter that is never right shows little"
