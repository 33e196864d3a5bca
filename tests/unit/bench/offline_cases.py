"""A tiny pair with a tokenizer, on disk, and a workload to ask it."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from tests.tiny_models import TINY_LAYER, TINY_TARGET, drafter_configs, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

TARGET = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, max_positions=128, eos_ids=(256,))
# More of everything, and heads twice as wide.
SHAPE = replace(
    TARGET,
    layer=replace(TINY_LAYER, hidden_size=64, intermediate_size=80, num_heads=8, num_kv_heads=4, head_dim=16),
    num_layers=10,
    vocab_size=400,
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    target: str
    drafters: tuple[str, str]
    workload: str


def write_pair(root: Path) -> Pair:
    """Random models: their drafts are seldom right, which no test here minds."""
    target = make_target(TARGET)
    save_target(target, root / "target")
    save_tokenizer(root / "target")
    for name in ("eagle3", "eagle3.1"):
        save_drafter(make_drafter(drafter_configs(TARGET)[name], target), root / name)
    questions = ["red", "green and blue", "one two three", "a", "more of it"]
    lines = [{"id": f"q{i}", "category": "test", "turns": [text, "and then?"]} for i, text in enumerate(questions)]
    (root / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return Pair(
        target=str(root / "target"),
        drafters=(str(root / "eagle3"), str(root / "eagle3.1")),
        workload=str(root / "asked.jsonl"),
    )
