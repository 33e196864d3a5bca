"""What HTTP costs a round: time per output token of streaming clients against the engine without a server.

    python benchmarks/serve_overhead.py --clients 64

The same requests (greedy, no end of text) run in turn through `fledge serve`, with all clients in a process of their
own, and through the engine alone, each in a process of its own, a few times each. Prints one JSON line with the medians
and their ratio. Two cores are not many: on a machine with more, give the engine `--threads` and leave some free.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOPICS = ("lists", "files", "classes", "sorting", "recursion", "strings", "sets", "loops")


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Write a short text about {TOPICS[number % len(TOPICS)]}, number {number}."}]


def speculation(arguments: argparse.Namespace) -> dict[str, Any] | None:
    if not arguments.drafter:
        return None
    return {"model": arguments.drafter, "num_speculative_tokens": arguments.depth, "adaptive": False}


def run_offline(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine alone: all requests at once, stepped until they are done, text made of their tokens."""
    import torch  # noqa: PLC0415 - the clients and the parent do without

    from fledge import LLM, SamplingParams  # noqa: PLC0415

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    llm = LLM(arguments.model, speculative_config=speculation(arguments), max_num_seqs=arguments.clients)
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    prompts = [llm.encode_chat(messages(number)) for number in range(arguments.clients)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))  # warm, and prefixes cached
    outputs = llm.generate(prompts, params)
    return {
        "tpot_ms": [1e3 * float(o.metrics.time_per_output_token(len(o.outputs[0].token_ids)) or 0) for o in outputs],
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
    }


async def run_client(port: int, number: int, tokens: int) -> float:
    """One streaming client; return its milliseconds for each token after the first chunk's one."""
    body = json.dumps(
        {
            "messages": messages(number),
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    first = last = 0.0
    seen = b""
    while b"[DONE]" not in seen:
        part = await reader.read(65536)
        assert part, "the server closed the connection"
        if b'"content":' in part:
            last = time.perf_counter()
            first = first or last
        seen = seen[-16:] + part
    writer.close()
    return 1e3 * (last - first) / (tokens - 1)


def run_clients(arguments: argparse.Namespace) -> dict[str, Any]:
    async def run(tokens: int) -> list[float]:
        clients = (run_client(arguments.port, number, tokens) for number in range(arguments.clients))
        return list(await asyncio.gather(*clients))

    asyncio.run(run(8))  # warm, and prefixes cached
    return {"tpot_ms": asyncio.run(run(arguments.tokens)), "tokens": arguments.tokens * arguments.clients}


def run_served(arguments: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    """A server, and its clients in a process of their own."""
    serve = [sys.executable, "-c", "from fledge.cli.main import run; run()", "serve", arguments.model, "--port", "0"]
    serve += ["--max-num-seqs", str(arguments.clients)]
    if arguments.threads:
        serve += ["--threads", str(arguments.threads)]
    if arguments.drafter:
        serve += ["--speculative-config", json.dumps(speculation(arguments))]
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                    break
            else:
                raise SystemExit("the server did not start")
            return run_part([*command, "--part", "clients", "--port", found[1]])
        finally:
            server.terminate()
            server.communicate(timeout=60)


def run_part(command: list[str]) -> dict[str, Any]:
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="fledgling")
    parser.add_argument("--drafter", default="fledgling-eagle3.1", help="empty: no speculation")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of the engine; 0: torch's choice")
    parser.add_argument("--part", choices=["all", "offline", "clients"], default="all")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.part != "all":
        print(json.dumps(run_offline(arguments) if arguments.part == "offline" else run_clients(arguments)))
        return
    command = [sys.executable, str(Path(__file__).resolve())]
    for name in ("model", "drafter", "depth", "clients", "tokens", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    served, offline = [], []
    for turn in range(arguments.repeats):
        offline.append(statistics.median(run_part([*command, "--part", "offline"])["tpot_ms"]))
        served.append(statistics.median(run_served(arguments, command)["tpot_ms"]))
        print(f"run {turn}: offline {offline[-1]:.3f} ms, served {served[-1]:.3f} ms per token", file=sys.stderr)
    result = {
        "clients": arguments.clients,
        "tokens": arguments.tokens,
        "depth": arguments.depth if arguments.drafter else 0,
        "threads": arguments.threads,
        "cores": os.cpu_count(),
        "offline_tpot_ms": statistics.median(offline),
        "served_tpot_ms": statistics.median(served),
        "ratio": statistics.median(served) / statistics.median(offline),
        "ratio_by_run": [s / o for s, o in zip(served, offline, strict=True)],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
