"""The bundled pair on a CPU while other processes keep its cores busy: giving way, not giving way, and one thread.

    python benchmarks/busy_neighbours.py [--threads 2] [--neighbours 0 2] [--repeats 8]

One engine; the arms take turns, prompt by prompt. A neighbour is a process that counts. Prints tokens per second, the
median over prompts, and the middle half of them.
"""

import argparse
import math
import multiprocessing
import statistics
import time

import torch

from fledge import LLM, SamplingParams
from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.evaluation.workloads import load_workload
from fledge.native import team


def count() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--repeats", type=int, default=8, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    speculation = {"model": DRAFTERS["EAGLE-3.1"], "num_speculative_tokens": 3, "adaptive": False}
    llm = LLM(TARGET, device="cpu", max_num_seqs=1, enable_prefix_caching=False, speculative_config=speculation)
    prompts = [one.messages[:1] for one in load_workload("mt_bench", sample=options.repeats).prompts]
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    arms = {
        f"{options.threads} threads": (options.threads, math.inf, team.Team()),
        "giving way": (options.threads, team.MAX_WAIT, team.Team()),
        "1 thread": (1, math.inf, team.Team()),
    }
    for neighbours in options.neighbours:
        busy = [multiprocessing.Process(target=count, daemon=True) for _ in range(neighbours)]
        for one in busy:
            one.start()
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for prompt in [prompts[0], *prompts]:  # the first one warms up
            answers = set()
            for name, (threads, max_wait, own) in arms.items():
                torch.set_num_threads(threads)
                team.MAX_WAIT, team._team = max_wait, lambda own=own: own
                begun = time.perf_counter()
                answer = llm.chat(list(prompt), params)[0].outputs[0]
                rates[name].append(len(answer.token_ids) / (time.perf_counter() - begun))
                answers.add(tuple(answer.token_ids))
            assert len(answers) == 1, "the number of threads changed an answer"
        for one in busy:
            one.terminate()
        print(f"{neighbours} neighbours")
        for name, found in rates.items():
            low, middle, high = statistics.quantiles(found[1:], n=4)
            print(f"  {name:12} {middle:7.1f} tokens/s ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
