"""vLLM as a worker: prompts come in as lines of JSON, answers with their times go out. Knows nothing of Fledge.

    python vllm_worker.py '{"target": ..., "drafter": ..., "depth": 3, "max_model_len": 1024, ...}'

A line in is {"prompts": [[token ids], ...], "max_tokens": n, "stop_token_ids": [...]}: all are asked at once. A line
out is {"seconds": s, "answers": [{"tokens", "first", "done", "drafted", "accepted"}, ...]}, times in seconds after the
start. It computes only between the two: nothing runs while it waits for a line.
"""

import json
import os
import sys
import time
from typing import Any

OUT = os.fdopen(os.dup(1), "w")  # vLLM prints to standard output; answers must not be lost among it
os.dup2(2, 1)
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: no messages, and nothing that polls
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)

import torch  # noqa: E402 - all three read the environment when they are imported
import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402


def open_engine(job: dict[str, Any]) -> LLM:
    torch.set_num_threads(job["threads"])
    speculation = None
    if job["drafter"] is not None:
        speculation = {"model": job["drafter"], "num_speculative_tokens": job["depth"]}
    return LLM(
        model=job["target"],
        dtype="float32",
        max_model_len=job["max_model_len"],
        max_num_seqs=job["max_num_seqs"],
        enforce_eager=job["enforce_eager"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed" if speculation else "none",
        speculative_config=speculation,
    )


def answer(engine: Any, asked: dict[str, Any], number: int) -> dict[str, Any]:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=asked["max_tokens"],
        stop_token_ids=asked["stop_token_ids"],
        ignore_eos=True,  # the ids above say where answers end
        detokenize=False,
    )
    names = [f"{number}-{i}" for i in range(len(asked["prompts"]))]
    first: dict[str, float] = {}
    answers: dict[str, dict[str, Any]] = {}
    started = time.perf_counter()
    for name, prompt in zip(names, asked["prompts"], strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = time.perf_counter() - started
            (completion,) = output.outputs
            if completion.token_ids:
                first.setdefault(output.request_id, now)
            if output.finished:
                rounds = completion.spec_decode_metrics
                answers[output.request_id] = {
                    "tokens": list(completion.token_ids),
                    "first": first[output.request_id],
                    "done": now,
                    "drafted": list(rounds.per_step_drafted) if rounds else [],
                    "accepted": list(rounds.per_step_accepted) if rounds else [],
                }
    return {"seconds": time.perf_counter() - started, "answers": [answers[name] for name in names]}


def say(values: dict[str, Any]) -> None:
    OUT.write(json.dumps(values) + "\n")
    OUT.flush()


def main() -> None:
    llm = open_engine(json.loads(sys.argv[1]))
    say({"ready": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()})
    for number, line in enumerate(sys.stdin):
        say(answer(llm.llm_engine, json.loads(line), number))


if __name__ == "__main__":
    main()
