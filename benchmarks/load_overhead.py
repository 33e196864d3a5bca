"""What `fledge bench serve` costs itself: its client against a server that answers at once, in a process of its own.

    python benchmarks/load_overhead.py --concurrency 64

Prints one JSON line. `instant`: answers of one piece, so that requests are timed, as fast as they go. `paced`: answers
of 64 pieces, ten milliseconds apart, so that streams are timed; the TTFT, and what the TPOT has beyond 10 ms, come from
the load generator as far as they do not come from the little server.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from fledge.bench.load.run import CellRun, ServeSettings, lag_ms
from fledge.bench.load.servers import ServerSpec, connect
from fledge.evaluation.results import Cell, Load
from fledge.evaluation.workloads import Prompt, Workload

GAP = 0.01


def chunk(value: Any) -> bytes:
    data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def piece(last: bool) -> bytes:
    choice = {"index": 0, "delta": {"content": "word "}, "finish_reason": "length" if last else None}
    return chunk({"id": "x", "object": "chat.completion.chunk", "model": "m", "choices": [choice]})


async def serve() -> None:
    """Print a port, then answer for ever: `max_tokens` pieces, at once if it is 1."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length:")[2].split()
                body = await reader.readexactly(int(length[0])) if length else b""
                if not body:
                    text = b'{"data": [{"id": "m"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
                    continue
                count = json.loads(body)["max_tokens"]
                kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                writer.write(b"HTTP/1.1 200 OK\r\n" + kind)
                due = time.monotonic()
                for i in range(count):
                    writer.write(piece(i == count - 1))
                    due += GAP
                    if i < count - 1:
                        await asyncio.sleep(max(0.0, due - time.monotonic()))
                usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}}
                writer.write(chunk(usage) + chunk(b"[DONE]") + b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def measure(url: str, concurrency: int, requests: int, pieces: int) -> dict[str, float]:
    server = await connect(ServerSpec(name="instant", url=url))
    messages = ({"role": "user", "content": "What is measured here is the one who asks. " * 5},)
    prompts = [Prompt(id=str(i), category="x", messages=messages) for i in range(requests)]
    workload = Workload(name="", prompts=tuple(prompts), source="", licence="")
    load = Load(concurrency=concurrency)
    cell = Cell(contender="instant", workload=workload.name, load=load, repeat=0, seconds=0.0, requests=())
    settings = ServeSettings(
        servers=(server.spec,), workloads=(workload,), loads=(load,), max_tokens=pieces, timeout=60
    )
    for _ in range(2):  # the first is warm-up
        run = CellRun(settings=settings, server=server, cell=cell, prompts=prompts)
        begun = time.process_time()
        await run.run()
        spent = time.process_time() - begun
    server.client.close()
    cell = run.result()
    assert cell.status == "complete", cell.note
    first = [1e3 * ((one.first_token or 0) - one.sent) for one in cell.good]
    each = [1e3 * ((one.done or 0) - (one.first_token or 0)) / max(1, pieces - 1) for one in cell.good]
    return {
        "requests_per_second": round(requests / cell.seconds, 1),
        "pieces_per_second": round(requests * pieces / cell.seconds, 1),
        "cpu_ms_per_request": round(1e3 * spent / requests, 3),
        "cpu_ms_per_piece": round(1e3 * spent / requests / pieces, 3),
        "ttft_ms_p50": round(statistics.median(first), 3),
        "tpot_ms_p50": round(statistics.median(each), 3),
        "lag_ms_p99": round(lag_ms(run.late), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--serve", action="store_true", help="be the server")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            result: dict[str, Any] = {"concurrency": arguments.concurrency, "cores": os.cpu_count()}
            for name, pieces in (("instant", 1), ("paced", 64)):
                result[name] = asyncio.run(measure(url, arguments.concurrency, arguments.requests, pieces))
        finally:
            process.kill()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
