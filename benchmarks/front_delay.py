"""What Fledge in front of a vLLM adds to the first byte of a stream and to its last: asked directly, and through it.

    python benchmarks/front_delay.py [--requests 300] [--concurrency 1]

A stand-in for vLLM (tests/fake_vllm_server.py) answers at once, so that the difference is what the front costs, which
is `fledge serve` of the bundled pair. Requests take turns: one directly, one through the front. Prints a line of JSON.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.fake_vllm import put  # noqa: E402

BODY = {"prompt": [1, 2, 3], "max_tokens": 64, "stream": True, "temperature": 0}


def first_and_last(client: httpx.Client) -> tuple[float, float]:
    """Seconds to the first byte of a stream, and to its end."""
    started = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=BODY) as stream:
        first = None
        for _ in stream.iter_raw():
            first = first or time.perf_counter() - started
    assert first is not None
    return first, time.perf_counter() - started


def measure(direct: httpx.Client, through: httpx.Client, requests: int) -> list[tuple[float, float]]:
    """Pairs of (what the front adds to the first byte, and to the last), in milliseconds."""
    added = []
    for _ in range(requests):
        (first, last), (front_first, front_last) = first_and_last(direct), first_and_last(through)
        added.append((1e3 * (front_first - first), 1e3 * (front_last - last)))
    return added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=1)
    given = parser.parse_args()
    added: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "fledge", "serve", "--engine", "vllm", "--port", "0"]
        found = {**os.environ, **put(Path(directory))}
        found["PYTHONPATH"] += os.pathsep + str(ROOT / "src")
        with subprocess.Popen(command, env={**found, "TMPDIR": directory}, stderr=subprocess.PIPE, text=True) as front:
            assert front.stderr is not None
            url = next(found[0] for line in front.stderr if (found := re.findall(r"http://[\d.:]+", line)))
            (socket,) = Path(directory).glob("fledge-vllm-*/vllm.sock")
            log = threading.Thread(target=front.stderr.read, daemon=True)  # or its pipe fills up
            log.start()

            def work() -> None:
                transport = httpx.HTTPTransport(uds=str(socket))
                with (
                    httpx.Client(base_url="http://vllm", transport=transport, timeout=60) as direct,
                    httpx.Client(base_url=url, timeout=60) as through,
                ):
                    measure(direct, through, 20)
                    added.extend(measure(direct, through, given.requests))

            threads = [threading.Thread(target=work) for _ in range(given.concurrency)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            front.terminate()
    result: dict[str, float] = {"requests": len(added), "concurrency": given.concurrency}
    for name, values in zip(("first_byte_ms", "last_byte_ms"), zip(*added, strict=True), strict=True):
        ordered = sorted(values)
        result[f"{name}_median"] = round(statistics.median(ordered), 3)
        result[f"{name}_p99"] = round(ordered[int(0.99 * len(ordered))], 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
