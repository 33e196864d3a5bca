"""What Fledge in front of a vLLM adds to the first byte of a stream and to its last: asked directly, and through it.

    python benchmarks/proxy_delay.py [--requests 300] [--concurrency 1] [--max-tokens 64]

A stand-in for vLLM (tests/fake_vllm_server.py) answers at once, so that the difference is what the proxy costs, which
is `fledge serve` of the bundled pair. Requests take turns: one directly, one through the proxy. Where others keep the
cores busy, `quiet` is the better figure: the fastest tenth through the proxy against the fastest tenth directly; so is
the processor time that the proxy takes for a request, from its first byte to its line in the log. Prints one line
of JSON.
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
from collections.abc import Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.fake_vllm import put  # noqa: E402

BODY = {"prompt": [1, 2, 3], "stream": True, "temperature": 0}


def first_and_last(client: httpx.Client, max_tokens: int) -> tuple[float, float]:
    """Seconds to the first byte of a stream, and to its end."""
    started = time.perf_counter()
    with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": max_tokens}) as stream:
        first = None
        for _ in stream.iter_raw():
            first = first or time.perf_counter() - started
    assert first is not None
    return first, time.perf_counter() - started


def processor_seconds(pid: int) -> float:
    """Of all threads of a process, so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def report(name: str, direct: Sequence[float], through: Sequence[float]) -> dict[str, float]:
    """What the proxy adds, in milliseconds, of seconds that were measured in turns."""
    added = sorted(b - a for a, b in zip(direct, through, strict=True))
    tenth = len(added) // 10
    figures = {"median": statistics.median(added), "p90": added[-1 - tenth]}
    figures["quiet"] = sorted(through)[tenth] - sorted(direct)[tenth]
    return {f"{name}_{kind}": round(1e3 * value, 3) for kind, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()
    seen: list[tuple[tuple[float, float], tuple[float, float]]] = []  # (first byte, last), directly and through
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "fledge", "serve", "--engine", "vllm", "--port", "0"]
        found = {**os.environ, **put(Path(directory))}
        found["PYTHONPATH"] += os.pathsep + str(ROOT / "src")
        with subprocess.Popen(command, env={**found, "TMPDIR": directory}, stderr=subprocess.PIPE, text=True) as proxy:
            assert proxy.stderr is not None
            url = next(found[0] for line in proxy.stderr if (found := re.findall(r"http://[\d.:]+", line)))
            (socket,) = Path(directory).glob("fledge-vllm-*/vllm.sock")
            log = threading.Thread(target=proxy.stderr.read, daemon=True)  # or its pipe fills up
            log.start()

            def work() -> None:
                transport = httpx.HTTPTransport(uds=str(socket))
                with (
                    httpx.Client(base_url="http://vllm", transport=transport, timeout=60) as direct,
                    httpx.Client(base_url=url, timeout=60) as through,
                ):
                    for _ in range(given.requests):
                        asked = [first_and_last(one, given.max_tokens) for one in (direct, through)]
                        seen.append((asked[0], asked[1]))

            warm = httpx.Client(base_url=url, timeout=60)
            for _ in range(20):
                first_and_last(warm, given.max_tokens)
            before = processor_seconds(proxy.pid)
            threads = [threading.Thread(target=work) for _ in range(given.concurrency)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            spent = processor_seconds(proxy.pid) - before
            proxy.terminate()
    result: dict[str, float] = {"requests": len(seen), "concurrency": given.concurrency}
    result["proxy_processor_ms"] = round(1e3 * spent / len(seen), 3)
    for i, name in enumerate(("first_byte_ms", "last_byte_ms")):
        result |= report(name, [direct[i] for direct, _ in seen], [through[i] for _, through in seen])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
