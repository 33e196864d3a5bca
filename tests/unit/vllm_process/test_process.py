"""vLLM found, started, watched and ended: with a stand-in that starts at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fledge.errors import ConfigError
from fledge.vllm_process.client import VllmClient, VllmError
from fledge.vllm_process.counters import VllmCounters
from fledge.vllm_process.finding import OLDEST, VERSIONS, VllmInstallation, find_vllm
from fledge.vllm_process.process import VllmProcess, error_line, option_words
from tests.fake_vllm import install

pytestmark = pytest.mark.vllm  # with a stand-in, beside those with the real one


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(what) -> None:
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)


def test_finds_it_or_says_what_is_wrong_on_one_line(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path)
    found = find_vllm()
    assert (found.version, found.warning, found.has_request_metrics) == ("0.32.0", None, True)
    with pytest.raises(ConfigError, match=r"--vllm-python /nowhere/python: cannot be run: No such file"):
        find_vllm("/nowhere/python")
    with pytest.raises(ConfigError, match=r"is no Python 3.11 or later"):
        find_vllm("/bin/false")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"vLLM is not installed in .*: pip install 'fledge\[vllm\]', or name a Python"
    ):
        find_vllm()


def test_versions(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, version="0.9.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.9\.1 in .* is too old; known to work: 0\.32\.x, 0\.26\.x"):
        find_vllm()
    newer = VllmInstallation(python="python", version="0.99.0")
    assert newer.warning == "vLLM 0.99.0 was not tried with Fledge; known to work: 0.32.x, 0.26.x"
    assert newer.has_request_metrics
    assert not VllmInstallation(python="python", version="0.26.0").has_request_metrics
    assert [row["series"] for row in VERSIONS][-1] == OLDEST
    page = (Path(__file__).parents[3] / "docs" / "distributed.md").read_text()
    for row in VERSIONS:
        assert f"| {row['series']} | {row['tried']} | {'yes' if row['request_metrics'] else 'no'} |" in page


def test_answers_at_a_private_socket_and_leaves_nothing_behind(monkeypatch, tmp_path):
    worker = tmp_path / "worker"
    install(monkeypatch, tmp_path, worker=str(worker))
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    said: list[str] = []
    with VllmProcess(find_vllm(), "model", ["--max-num-seqs", "4"], log_file=tmp_path / "log") as vllm:
        vllm.wait_until_ready(30, said.append)
        directory = Path(vllm.socket).parent
        assert directory.stat().st_mode & 0o777 == 0o700
        assert vllm.client.get("/argv") == (
            b'{"argv": ["--model", "model", "--max-num-seqs", "4", "--uds", "%s"], "key": null}' % vllm.socket.encode()
        )
        body = {"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True}
        events = list(vllm.client.stream("/v1/completions", body))
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == [6, 7, 8]
        with pytest.raises(VllmError, match="vLLM: The model `x` does not exist") as refused:
            vllm.client.post("/v1/completions", {"prompt": [1], "model": "x"})
        assert refused.value.status == 404
    assert said[-1].startswith("vLLM 0.32.0 is ready after")
    assert not directory.exists()
    wait_until(lambda: not is_running(int(worker.read_text())))
    assert "Resolved architecture" in (tmp_path / "log").read_text()


def test_ends_with_a_parent_that_is_killed(monkeypatch, tmp_path):
    worker = tmp_path / "worker"
    install(monkeypatch, tmp_path, worker=str(worker))
    source = str(Path(__file__).parents[3] / "src")
    code = (
        f"import sys, time; sys.path.insert(0, {source!r})\n"
        "from fledge.vllm_process.finding import find_vllm\n"
        "from fledge.vllm_process.process import VllmProcess\n"
        "VllmProcess(find_vllm(), 'model').wait_until_ready(30); print('ready', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_running(int(worker.read_text())))


def test_a_start_that_fails_is_one_line(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, fail="api_server.py: error: unrecognized arguments: --x")
    with VllmProcess(find_vllm(), "model") as vllm:
        with pytest.raises(VllmError, match=r"status 1: api_server\.py: error: unrecognized arguments: --x$"):
            vllm.wait_until_ready(30)
        assert not vllm.is_alive


def test_a_start_that_takes_too_long_is_given_up(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, start_seconds=60)
    with VllmProcess(find_vllm(), "model") as vllm:
        wait_until(lambda: vllm.last_line == "Resolved architecture")
        with pytest.raises(VllmError, match=r"was not ready within 0\.1 s; the last it said: Resolved architecture"):
            vllm.wait_until_ready(0.1)
        assert not vllm.is_alive


def test_a_death_says_how_and_why(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, die_after=1)
    with VllmProcess(find_vllm(), "model") as vllm:
        vllm.wait_until_ready(30)
        with pytest.raises(VllmError):
            list(vllm.client.stream("/v1/completions", {"prompt": [1]}))
        reason = vllm.wait()
    assert reason == (
        "it was killed by SIGKILL (by the system, if memory ran out): torch.OutOfMemoryError: CUDA out of memory"
    )


def test_the_cause_is_told_from_its_consequences():
    log = [
        "(APIServer pid=1) INFO 11-16 05:49:06 [core.py:1] loading",
        "(Worker pid=3) ERROR 11-16 05:49:06 [core.py:1] Traceback (most recent call last):",
        "(Worker pid=3) ERROR 11-16 05:49:07 [core.py:1] ValueError: 5 heads cannot be split by 2",
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert error_line(log) == "ValueError: 5 heads cannot be split by 2"
    assert error_line(log[:1]) is None
    pydantic = ["pydantic_core.ValidationError: 1 validation error for ModelConfig", "  Value error, 9 [type=value]"]
    assert error_line(pydantic) == "pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, 9"


def test_counters_give_the_tally_and_add_engines():
    text = "".join(
        f'vllm:spec_decode_num_drafts_total{{engine="{engine}"}} 10.0\n'
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="0"}} 6.0\n'
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="1"}} 2.0\n'
        f'vllm:kv_cache_usage_perc{{engine="{engine}"}} 0.5\nvllm:generation_tokens_created 1.7e9\n'
        for engine in (0, 1)
    )
    counters = VllmCounters.read(text)
    assert counters.tally == {(2, 0): 8, (2, 1): 8, (2, 2): 4}
    assert (counters["kv_cache_usage_perc"], counters["generation_tokens"]) == (0.5, 0.0)
    assert VllmCounters.read("").tally == {}


def test_options_as_words():
    options = {"tensor_parallel_size": 2, "speculative_config": {"model": "d"}, "enforce_eager": True, "seed": None}
    options |= {"enable_prefix_caching": False, "served_model_name": ["a", "b"]}
    assert option_words(options) == [
        *("--tensor-parallel-size", "2", "--speculative-config", '{"model": "d"}', "--enforce-eager"),
        *("--no-enable-prefix-caching", "--served-model-name", "a", "b"),
    ]
    with pytest.raises(ConfigError, match="expected the address of a vLLM"):
        VllmClient("localhost:8000")
