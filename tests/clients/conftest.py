"""A running `fledge serve` of the bundled pair, for clients that live in an environment of their own.

`make test-clients` builds it and says with FLEDGE_PYTHON which Python has Fledge; here nothing imports it, nor torch.
"""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ports import free_port

KEY = "sk-of-the-clients"
os.environ.update(  # read when these packages are imported: none of them asks anything of the network
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false"
)


class Server(NamedTuple):
    url: str
    model: str
    key: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def post(self, path: str, **body: Any) -> Any:
        """Ask without any client; return the JSON."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    python = os.environ.get("FLEDGE_PYTHON")
    if python is None:
        pytest.skip("FLEDGE_PYTHON is not set (make test-clients sets it)")
    port = free_port()
    command = [python, "-m", "fledge", "serve", "--port", str(port), "--api-key", KEY]
    process = subprocess.Popen([*command, "--served-model-name", "fledgling"])
    try:
        found = Server(f"http://127.0.0.1:{port}", "fledgling", KEY)
        deadline = time.monotonic() + 120
        while not _is_well(found.url):
            assert process.poll() is None, "fledge serve ended"
            assert time.monotonic() < deadline, "fledge serve never answered"
            time.sleep(0.2)
        yield found
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def _is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
