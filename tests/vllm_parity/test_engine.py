"""Real vLLM as Fledge's other engine: served through the proxy, and behind `LLM`, split over two processes.

The tokens are those of our own engine, and so are the rounds. Run by `make test-vllm`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge import LLM, SamplingParams
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.source import DRAFTERS, TARGET, bundled_directory
from fledge.checkpoints.target import save_target
from fledge.models.drafter.variants import EAGLE_3_1
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from tests.vllm_parity.pairs import LLAMA, text
from tests.vllm_parity.small_training import Budget, train_drafter, train_target

DEPTH = 3
MARK = "FLEDGE_TEST_PROXY"
OPTIONS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("FLEDGE_VLLM_PYTHON" not in os.environ, reason="make test-vllm sets FLEDGE_VLLM_PYTHON"),
    pytest.mark.filterwarnings("ignore::fledge.errors.CheckpointWarning"),
]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`fledge serve` of the bundled pair by two replicas of vLLM (data parallel), with keys."""
    words = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"]
    speculation = json.dumps({"model": DRAFTERS["EAGLE-3.1"], "num_speculative_tokens": DEPTH})
    words += ["--speculative-config", speculation, "--engine", "vllm", "--port", "0", "--api-key", "key"]
    words += ["--data-parallel-size", "2", "--admin-api-key", "admin"]
    log = tmp_path_factory.mktemp("proxy") / "log"
    command = [sys.executable, "-m", "fledge", "serve", TARGET, *words]
    with log.open("w") as errors:
        marked = {**os.environ, **ENVIRONMENT, MARK: str(log)}
        server = subprocess.Popen(command, stderr=errors, text=True, env=marked)
    try:
        deadline = time.monotonic() + 600  # two replicas on a busy machine
        while not (found := re.search(r"serving .* at (http://[\d.:]+) ", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.3)
        yield found[1], server
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def ours() -> LLM:
    speculation = {"model": DRAFTERS["EAGLE-3.1"], "num_speculative_tokens": DEPTH, "adaptive": False}
    return LLM(TARGET, speculative_config=speculation, **OPTIONS)  # type: ignore[arg-type]


def test_streams_through_the_proxy_have_our_tokens_and_their_rounds_are_known(
    proxy: tuple[str, subprocess.Popen[str]], ours: LLM
) -> None:
    url, _ = proxy
    prompt = ours.encode_chat(MESSAGES)
    (expected,) = ours.generate([prompt], GREEDY)
    body: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer key"}, timeout=120) as client:
        assert httpx.get(url + "/v1/models").status_code == 401
        by_ids = client.post("/v1/completions", json={**body, "prompt": prompt, "return_token_ids": True})
        events = [json.loads(line[6:]) for line in by_ids.text.splitlines() if line.startswith("data: {")]
        tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
        assert tuple(tokens) == expected.outputs[0].token_ids
        assert all(event["choices"] for event in events)  # the usage that nobody asked for is not among them
        chat = client.post("/v1/chat/completions", json={**body, "messages": MESSAGES})
        parts = [json.loads(line[6:]) for line in chat.text.splitlines() if line.startswith("data: {")]
        said = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
        assert said == expected.outputs[0].text
        time.sleep(0.5)
        data = client.get("/dashboard/data").json()
        lengths = {one["name"]: one["acceptance_length"] for one in data["templates"]}
        assert lengths["none"] == lengths["default"] == expected.metrics.acceptance.acceptance_length
        assert _drafts(url) == 2 * expected.metrics.acceptance.rounds
        refused = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": "x"})
        assert refused.status_code == 400  # in vLLM's own words
        assert "max_tokens" in refused.text


def test_another_drafter_drafts_in_both_replicas_and_a_stream_goes_on(
    proxy: tuple[str, subprocess.Popen[str]], ours: LLM, tmp_path: Path
) -> None:
    """One of random weights takes over in the middle: the same tokens in more rounds, and the first one comes back."""
    url, _ = proxy
    own = bundled_directory(DRAFTERS["EAGLE-3.1"])
    assert own is not None
    shutil.copytree(own, tmp_path / "random")
    weights = load_file(tmp_path / "random" / "model.safetensors")
    weights["fc.weight"] = torch.randn_like(weights["fc.weight"])
    save_file(weights, tmp_path / "random" / "model.safetensors")
    prompt = ours.encode_chat(MESSAGES)
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer key"}, timeout=120) as client:

        def swap(model: str) -> httpx.Response:
            admin = {"Authorization": "Bearer admin"}
            return client.post("/admin/drafter", json={"model": model}, headers=admin)

        def rounds() -> int:
            """Of two requests at once, one for each replica."""
            body = {"prompt": [prompt] * 2, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
            before = _drafts(url)
            client.post("/v1/completions", json=body)
            return _drafts(url) - before

        body = {"prompt": prompt, "max_tokens": 96, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
        few = rounds()
        tokens: list[int] = []
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            for i, line in enumerate(line for line in stream.iter_lines() if line.startswith("data: {")):
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                if i == 3:
                    assert swap(str(tmp_path / "random")).json()["drafter"] == str(tmp_path / "random")
        assert tokens == whole
        assert rounds() > 1.3 * few
        assert swap(DRAFTERS["EAGLE-3.1"]).status_code == 200
        assert rounds() == few
        assert swap(DRAFTERS["EAGLE-3"]).status_code == 409


def _drafts(url: str) -> int:
    text = httpx.get(url + "/metrics").text
    return int(sum(map(float, re.findall(r"^vllm:spec_decode_num_drafts_total\{.*\} ([\d.]+)$", text, re.M))))


def test_sigterm_lets_a_stream_end_and_leaves_nothing(proxy: tuple[str, subprocess.Popen[str]], ours: LLM) -> None:
    url, server = proxy
    assert len(_marked()) > 2  # the proxy, vLLM, its engine
    body = {"prompt": ours.encode_chat(MESSAGES), "max_tokens": 60, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer key"}
    with httpx.stream("POST", url + "/v1/completions", json=body, headers=headers, timeout=120) as stream:
        parts = stream.iter_text()
        first = next(parts)
        server.send_signal(signal.SIGTERM)
        assert (first + "".join(parts)).endswith("data: [DONE]\n\n")
    assert server.wait(60) == 0
    assert not _marked()


def _marked() -> list[str]:
    """The processes that have the variable which the server, and so all that it started, was given."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}=".encode() in environment.read_bytes():
                found.append(environment.parent.name)
        except OSError:  # gone, or somebody else's
            continue
    return found


def test_two_processes_share_the_target_and_give_our_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    layer = replace(LLAMA.layer, num_heads=4, num_kv_heads=2)
    config = replace(LLAMA, layer=layer, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,))
    target = train_target(config, text(), Budget(steps=60, rate=4e-3))
    save_target(target, tmp_path / "target")
    save_tokenizer(tmp_path / "target")
    drafter = train_drafter(EAGLE_3_1.config_for(config), target, text(), Budget(steps=40, rate=3e-3), unroll=3)
    save_drafter(drafter, tmp_path / "drafter")
    speculation = {"model": str(tmp_path / "drafter"), "num_speculative_tokens": DEPTH}
    prompts = [text()[start : start + 16].tolist() for start in (0, 1000)]
    answers = {}
    for engine, more in (("fledge", {}), ("vllm", {"tensor_parallel_size": 2})):
        own = {**speculation, "adaptive": False} if engine == "fledge" else speculation
        llm = LLM(tmp_path / "target", engine=engine, speculative_config=own, **OPTIONS, **more)  # type: ignore[arg-type]
        answers[engine] = [llm.generate([prompt], replace(GREEDY, max_tokens=12))[0] for prompt in prompts]
        llm.close()
    for one, other in zip(answers["fledge"], answers["vllm"], strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.metrics.acceptance == other.metrics.acceptance
        assert one.outputs[0].rounds == other.outputs[0].rounds
