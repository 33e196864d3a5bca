"""What an attacker sends: everybody else is served meanwhile, and the server stays small and can be stopped."""

import asyncio
import json
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from fledge.server import connections
from fledge.server.structured import COMPILE_SECONDS
from tests.e2e.test_serve_http import CHAT, COMPLETIONS, HELLO, RESPONSES, post, refusal
from tests.e2e.test_serve_load import Process
from tests.serving import Serving, make_service

PATTERNS = [{"type": "string", "pattern": f".*{letter}.*"} for letter in "0123456789abcdefghij"]
BOMB = {"messages": HELLO, "max_tokens": 4, "guided_json": {"allOf": PATTERNS}}


@pytest.fixture(name="serving", scope="module")
def _serving() -> Iterator[Serving]:
    with Serving(make_service(allowed_hosts=("example.org",))) as serving:
        yield serving
        serving.until_idle()
        assert serving.service.body_bytes == 0


@pytest.fixture(name="http", scope="module")
def _http(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, timeout=60) as client:
        yield client


def half_open(port: int, sent: bytes = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_a_server_under_attack_serves_and_can_be_stopped() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # for the process that is started now
    try:
        process = Process("--log-format", "json", forked=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with process, ExitStack() as opened:
        before = process.memory()
        for _ in range(300):
            opened.enter_context(half_open(process.port))
        http = opened.enter_context(httpx.Client(base_url=process.url, timeout=30))
        assert http.get("/health").status_code == 200
        assert len("".join(process.lines)) < 10_000
        refusal(http.get("/", headers={"Host": "rebound.example"}), 403)  # no key, this machine only: its names
        assert http.get("/", headers={"Host": "localhost:1"}).status_code == 200

        with ThreadPoolExecutor(4) as threads:
            bombs = [threads.submit(http.post, CHAT, json=BOMB) for _ in range(2)]
            started = time.monotonic()
            assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 4}).status_code == 200
            for bomb in bombs:
                assert refusal(bomb.result(), 400)["code"] == "invalid_grammar"
            assert time.monotonic() - started < COMPILE_SECONDS  # their CPU time was over long before
            body = {"messages": HELLO, "max_tokens": 8, "guided_regex": "[ab]{5}"}
            assert set(http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]) <= {"a", "b"}
            assert process.memory() < before + 2**30
            last = [threads.submit(http.post, CHAT, json=BOMB) for _ in range(2)]
            time.sleep(0.3)
            process.process.send_signal(signal.SIGTERM)
            started = time.monotonic()
            process.end()
            assert time.monotonic() - started < 12
            assert all(bomb.result().status_code in (400, 503) for bomb in last if bomb.exception() is None)


def test_dense_json_is_refused_unparsed_and_brackets_in_text_are_not(http: httpx.Client) -> None:
    dense = b'{"prompt":[' + b"[1]," * 450_000 + b"[1]]}"
    started = time.perf_counter()
    error = refusal(post(http, COMPLETIONS, dense), 400)
    assert "arrays and objects" in error["message"]
    assert time.perf_counter() - started < 1
    # Nor by way of strings: quotes that never end, backslashes, or JSON that a tool was called with.
    for odd in (b'{"a":"' + b'\\"[' * 500_000, b'["' * 500_000, b'["[\\' * 300_000):
        started = time.perf_counter()
        refusal(post(http, COMPLETIONS, odd), 400)
        assert time.perf_counter() - started < 1
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":[' + "[]," * 9000 + "1]}"}}
    messages = [{"role": "assistant", "tool_calls": [call]}] * 3
    assert "arrays and objects" in refusal(http.post(CHAT, json={"messages": messages}), 400)["message"]
    error = refusal(http.post(COMPLETIONS, json={"prompt": "[{" * 30_000 + '\\"'}), 400)
    assert error["code"] == "context_length_exceeded"
    many = {"prompt": "a", **{f"field {number}": 1 for number in range(5000)}}
    assert "fields" in refusal(http.post(COMPLETIONS, json=many), 400)["message"]


def test_tool_schemas_are_read_outside_the_event_loop(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, threads = serving.service.prompts, []
    encode = prompts._encode
    monkeypatch.setattr(prompts, "_encode", lambda *a: threads.append(threading.current_thread().name) or encode(*a))
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    httpx.post(f"{serving.url}/tokenize", json={"messages": HELLO, "tools": [tool]})
    assert [name.startswith("prompts") for name in threads] == [True]


def test_bodies_that_never_end_have_a_budget(
    serving: Serving, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fledge.server.api.MAX_TOTAL_BODY_BYTES", 2**20)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 60)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 2000000\r\n\r\n"
    limit = serving.service.options.max_body_bytes
    with ExitStack() as opened:
        for _ in range(12):
            opened.enter_context(half_open(serving.port, head + b" " * 300_000))
        deadline = time.monotonic() + 10
        while serving.service.body_bytes < 2**20 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert refusal(post(http, COMPLETIONS, b" " * 1_500_000), 503)["code"] == "too_many_bodies"
        assert serving.service.body_bytes <= max(2**20, limit) + 12 * 2**17
        assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2}).status_code == 200
    refusal(post(http, COMPLETIONS, b" " * (limit + 1)), 413)


def test_heads_have_a_deadline_also_on_connections_that_were_used(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for sent in (b"", b"GET /hea", health + b"GET /health HTT"):
        with half_open(serving.port, sent) as connection:
            assert is_closed(connection, 3), sent


def test_connections_have_a_limit_and_those_that_say_nothing_go_first(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "connection_limit", lambda: 8)
    body = {"prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with ExitStack() as opened, httpx.stream("POST", serving.url + COMPLETIONS, json=body) as stream:
        silent = [opened.enter_context(half_open(serving.port)) for _ in range(20)]
        assert httpx.get(serving.url + "/health", timeout=10).status_code == 200
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert all(is_closed(connection, 3) for connection in silent[:10])


def test_accept_errors_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        loop = asyncio.get_running_loop()
        connections.limit_accept_error_logs(loop)
        for _ in range(2000):
            error = OSError(24, "Too many open files")
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})

    with caplog.at_level(logging.ERROR):
        asyncio.run(fail())
    assert [record.exc_info for record in caplog.records] == [None]


def test_other_hosts_are_refused(http: httpx.Client) -> None:
    for host in ("example.org", "EXAMPLE.org:8000", "localhost", "127.0.0.1:80", "[::1]:8000", "10.0.0.7"):
        assert http.get("/health", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "example.org.evil.example", "localhost.evil.example:8000", "[", "1"):
        error = refusal(http.get("/health", headers={"Host": host}), 403)
        assert error["code"] == "host_not_allowed"


def test_two_lengths_close_the_connection(serving: Serving) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(body)
    with half_open(serving.port, head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")
        assert is_closed(connection, 3)


def test_cached_prefixes_are_not_shared_between_keys() -> None:
    with Serving(make_service(api_keys=("first", "second"))) as serving:

        def cached(key: str, **more: Any) -> int:
            body = {"prompt": [5] * 120, "max_tokens": 1, **more}
            answer = httpx.post(serving.url + COMPLETIONS, json=body, headers={"Authorization": f"Bearer {key}"})
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("first") == 0
        assert cached("first") > 0
        assert cached("second") == 0
        assert cached("second") > 0
        assert cached("second", cache_salt="mine") == 0
        body = {"input": "a", "max_output_tokens": 1, "cache_salt": "x" * 1024}  # the longest, with any key
        answer = httpx.post(serving.url + RESPONSES, json=body, headers={"Authorization": "Bearer first"})
        assert answer.status_code == 200, answer.text
