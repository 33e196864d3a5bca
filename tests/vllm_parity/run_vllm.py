"""Decode with real vLLM and write down every round. Run by the python of vLLM's environment; knows nothing of Fledge.

    python run_vllm.py job.json result.json

The job is {"max_tokens", "max_model_len", "runs": [{"name", "target", "drafter", "method", "num_speculative_tokens",
"requests": [{"prompt", "stop_token_ids"}, ...]}, ...]}, prompts being token ids; a run may have a "block_size". The
result is {name: {"answers": [{"tokens", "drafted", "accepted"}, ...], "totals": {...}}}, where `drafted` and `accepted`
have one number for each round and `totals` are vLLM's own counters over all requests of the run.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: an engine starts in seconds and goes with `del`
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",  # such small tensors: two threads on busy cores take ten times as long as one
)

from vllm import LLM, SamplingParams

_COUNTERS = "vllm:spec_decode_num_"


def decode(run: dict[str, Any], *, max_tokens: int, max_model_len: int) -> dict[str, Any]:
    """One engine, one prompt at a time: no batching, so no arithmetic depends on the company a prompt is in."""
    llm = LLM(
        model=run["target"],
        dtype="float32",
        max_model_len=max_model_len,
        max_num_batched_tokens=2 * max_model_len,
        max_num_seqs=2,
        block_size=run.get("block_size"),
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config={
            "method": run["method"],
            "model": run["drafter"],
            "num_speculative_tokens": run["num_speculative_tokens"],
        },
    )
    answers = []
    for request in run["requests"]:
        greedy = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            stop_token_ids=request["stop_token_ids"],
            ignore_eos=True,
            detokenize=False,
        )
        (output,) = llm.generate([{"prompt_token_ids": request["prompt"]}], greedy, use_tqdm=False)
        (completion,) = output.outputs
        rounds = completion.spec_decode_metrics
        answers.append(
            {
                "tokens": list(completion.token_ids),
                "drafted": list(rounds.per_step_drafted),
                "accepted": list(rounds.per_step_accepted),
            }
        )
    totals = {
        metric.name.removeprefix(_COUNTERS): getattr(metric, "values", None) or metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(_COUNTERS)
    }
    return {"answers": answers, "totals": totals}


def main(job_file: Path, result_file: Path) -> None:
    job = json.loads(job_file.read_text(encoding="utf-8"))
    results = {}
    for run in job["runs"]:
        results[run["name"]] = decode(run, max_tokens=job["max_tokens"], max_model_len=job["max_model_len"])
        gc.collect()  # or the next engine finds the memory of this one taken
        print(f"vLLM: {run['name']}", flush=True)
    result_file.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
