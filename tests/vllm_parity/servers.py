"""`fledge serve` and vLLM's server, both with the bundled target in float32, each in processes of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import httpx

from tests.ports import free_port

TARGET = resources.files("fledge") / "bundled" / "fledgling"
START_SECONDS = 300.0
# No sampling defaults of the model's, no prefixes kept.
COMMON = ("--served-model-name", "fledgling", "--dtype", "float32", "--max-model-len", "1024", "--host", "127.0.0.1")
COMMON += ("--generation-config", "vllm", "--no-enable-prefix-caching", "--enable-auto-tool-choice")
COMMON += ("--tool-call-parser", "hermes")
# A grammar leaves no blanks to choice. vLLM's other backend for that, guidance, cannot demand a tool call.
FLEDGE_ONLY = ("--threads", "1", "--structured-outputs-config", '{"disable_any_whitespace": true}')
VLLM_ONLY = ("--structured-outputs-config", '{"disable_any_whitespace": true, "backend": "xgrammar"}')
# What Fledge tells always and vLLM only on demand; and what a small machine needs.
VLLM_ONLY += ("--enable-request-id-headers", "--enable-prompt-tokens-details", "--enable-server-load-tracking")
VLLM_ONLY += ("--enforce-eager", "--max-num-seqs", "8", "--max-num-batched-tokens", "2048")
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def both_servers(vllm_python: str, logs: Path) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Yield a client of Fledge's and one of vLLM's. Fledge speculates, with the bundled drafter."""
    fledge = [sys.executable, "-m", "fledge", "serve", *COMMON, *FLEDGE_ONLY]
    vllm = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET), *COMMON, *VLLM_ONLY]
    with _server(vllm, logs / "vllm.log", VLLM_ENVIRONMENT) as theirs, _server(fledge, logs / "fledge.log", {}) as ours:
        for client, process, log in (ours, theirs):
            _wait(client, process, log)
        yield ours[0], theirs[0]


@contextmanager
def _server(
    command: Sequence[str], log: Path, environment: dict[str, str]
) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes], Path]]:
    port = free_port()
    with log.open("wb") as written:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=written,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # vLLM's engine is a process of its own, and goes with the server
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            yield client, process, log
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        said = f"{log.name}:\n{log.read_text(errors='replace')[-4000:]}"
        assert process.poll() is None, f"a server ended, see {said}"
        assert time.monotonic() < deadline, f"a server never answered, see {said}"
        time.sleep(0.5)
