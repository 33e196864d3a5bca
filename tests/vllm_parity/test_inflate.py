"""Real vLLM decodes an enlarged pair and gives the small pair's tokens, in the small pair's rounds."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fledge.bench.inflate_files import Inflation, write_inflated
from tests.vllm_parity.pairs import CASES, LLAMA, MAX_POSITIONS, Workshop
from tests.vllm_parity.test_parity import MAX_TOKENS, Answer, Run, decisive_answers, first_difference, load_pair

VLLM_PYTHON = os.environ.get("FLEDGE_VLLM_PYTHON")
DEPTH = 3
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


def test_vllm_gives_the_small_pairs_tokens_in_the_small_pairs_rounds(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    cases = [case for case in CASES if case.name in ("eagle3", "reduced-vocabulary")]  # the second one is 3.1
    small = {case.name: workshop.make(case) for case in cases}
    target = small["eagle3"].target
    write_inflated(
        Inflation(
            source=str(target),
            destination=tmp_path / "large",
            shape_name="small test",
            shape=SHAPE,
            drafters=tuple((str(small[case.name].drafter), tmp_path / f"large-{case.name}") for case in cases),
        )
    )
    answered = {case.name: decisive_answers(*load_pair(small[case.name]), DEPTH) for case in cases}
    job = {
        "max_tokens": MAX_TOKENS,
        "max_model_len": MAX_POSITIONS,
        "runs": [
            {
                "name": case.name,
                "target": str(tmp_path / "large"),
                "drafter": str(tmp_path / f"large-{case.name}"),
                "method": case.method,
                "num_speculative_tokens": DEPTH,
                "requests": [vars(request) for request in answered[case.name]],
            }
            for case in cases
        ],
    }
    (tmp_path / "job.json").write_text(json.dumps(job), encoding="utf-8")
    script = Path(__file__).with_name("run_vllm.py")
    command = [str(VLLM_PYTHON), str(script), str(tmp_path / "job.json"), str(tmp_path / "result.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    for case in cases:
        theirs = [Answer(**values) for values in results[case.name]["answers"]]
        run = Run(
            requests=list(answered[case.name]),
            ours=list(answered[case.name].values()),
            theirs=theirs,
            their_totals=results[case.name]["totals"],
        )
        assert (difference := first_difference(run)) is None, f"{case.name}: {difference}"
        assert any(any(answer.accepted) for answer in theirs), "a drafter that is never right shows little"
