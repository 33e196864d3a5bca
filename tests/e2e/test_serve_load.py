"""Many clients at once, clients that go away, and a server that is told to stop."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fledge import SamplingParams
from fledge.engine.outputs import RequestUpdate
from tests.forking import ForkedCommand
from tests.serving import MODEL, Serving, make_llm, make_service, pair_directory

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 200,
    "ignore_eos": True,
    "temperature": 0,
}
DROPPED = int(os.environ.get("FLEDGE_TEST_CONNECTIONS", "120"))  # 1000 for the full test


def request_bytes(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def drop(port: int, chance: random.Random) -> None:
    """Open a connection, send some or all of a request, read for a while, and vanish."""
    body = {**LONG, "stream": chance.random() < 0.7, "n": chance.choice([1, 1, 2]), "stop": chance.choice([None, "zq"])}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        message = request_bytes(body)
        if chance.random() < 0.15:
            message = message[: chance.randrange(len(message))]
        writer.write(message)
        await writer.drain()
        deadline = time.monotonic() + chance.choice([0.0, 0.01, 0.05, 0.2])
        while (left := deadline - time.monotonic()) > 0:
            try:
                if not await asyncio.wait_for(reader.read(4096), left):
                    break
            except TimeoutError:
                break
        if chance.random() < 0.5:
            writer.transport.abort()  # a reset rather than a goodbye
    except ConnectionError:
        pass
    finally:
        writer.close()


def storm(port: int, connections: int, seed: int) -> None:
    """So many connections, forty at a time."""

    async def run() -> None:
        chance = random.Random(seed)
        gate = asyncio.Semaphore(40)

        async def one() -> None:
            async with gate:
                await drop(port, random.Random(chance.random()))

        await asyncio.gather(*(one() for _ in range(connections)))

    asyncio.run(run())


@pytest.fixture(name="serving", scope="module")
def _serving() -> Iterator[Serving]:
    with Serving(make_service(make_llm(max_num_seqs=8), max_queue=200)) as serving:
        yield serving


def test_connections_that_are_dropped_leave_nothing_behind(serving: Serving) -> None:
    storm(serving.port, DROPPED, seed=1)
    serving.until_idle()
    assert serving.in_engine(lambda engine: engine.block_manager.used) == 0
    assert serving.in_engine(lambda engine: engine.stats().failed_steps) == 0
    assert serving.in_engine(lambda engine: engine.stats().aborted) > DROPPED // 4
    answer = httpx.post(serving.url + CHAT, json={**LONG, "max_tokens": 20}, timeout=60).json()
    expected = make_llm(speculative=False).chat(LONG["messages"], SamplingParams(temperature=0, max_tokens=20))
    assert answer["choices"][0]["message"]["content"] == expected[0].outputs[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request_within_a_round(serving: Serving, stream: bool) -> None:
    aborted = serving.in_engine(lambda engine: engine.stats().aborted)

    async def go() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        writer.write(request_bytes({**LONG, "stream": stream}))
        await writer.drain()
        if stream:
            await reader.readuntil(b"data:")
        else:
            deadline = time.monotonic() + 10
            while not serving.in_engine(lambda engine: engine.has_unfinished) and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
        writer.transport.abort()

    asyncio.run(go())
    serving.until_idle(5)
    assert serving.in_engine(lambda engine: engine.stats().aborted) == aborted + 1


def test_too_many_requests_get_429_and_when_to_come_back() -> None:
    async def ask(http: httpx.AsyncClient) -> httpx.Response:
        return await http.post(CHAT, json={**LONG, "max_tokens": 60})

    async def run(url: str) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
            return list(await asyncio.gather(*(ask(http) for _ in range(20))))

    with Serving(make_service(make_llm(max_num_seqs=2), max_queue=4)) as serving:
        answers = asyncio.run(run(serving.url))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) + sum(answer.status_code == 200 for answer in answers) == 20
        assert 10 <= len(refused) <= 14
        assert all(answer.headers["retry-after"] == "1" for answer in refused)
        assert refused[0].json()["error"]["type"] == "rate_limit_error"
        assert 'reason="queue_full"' in httpx.get(serving.url + "/metrics").text
        assert httpx.post(serving.url + CHAT, json={**LONG, "n": 7, "max_tokens": 1}).status_code == 400
        serving.until_idle()


def test_a_request_that_takes_too_long_is_ended() -> None:
    llm = make_llm()
    step = llm.engine.step

    def slowly() -> list[RequestUpdate]:
        time.sleep(0.01)
        return step()

    llm.engine.step = slowly  # type: ignore[method-assign]
    with Serving(make_service(llm, request_timeout=0.15)) as serving:
        whole = httpx.post(serving.url + CHAT, json=LONG, timeout=30)
        assert whole.status_code == 408
        assert whole.json()["error"]["code"] == "timeout"
        streamed = httpx.post(serving.url + CHAT, json={**LONG, "stream": True}, timeout=30)
        events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "timeout"
        assert "choices" in json.loads(events[0])
        serving.until_idle(5)


def test_a_drafter_that_fails_is_given_up_and_every_stream_goes_on() -> None:
    llm = make_llm(max_num_seqs=8)
    drafter, calls = llm.engine.runner.state.drafter, [0]
    assert drafter is not None

    def failing(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] > 30:
                raise RuntimeError("no kernel image is available")
            return method(*arguments)

        return call

    for name in ("forward", "draft_chain"):  # the second is all of a round's drafting, where it is one call
        setattr(drafter, name, failing(getattr(drafter, name)))

    async def one(http: httpx.AsyncClient, number: int) -> str:
        body = {**LONG, "messages": [{"role": "user", "content": f"Hello {number}"}], "max_tokens": 60, "stream": True}
        answer = await http.post(CHAT, json=body)
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")][:-1]
        return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)

    async def run(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            return list(await asyncio.gather(*(one(http, number) for number in range(6))))

    with Serving(make_service(llm)) as serving:
        found = asyncio.run(run(serving.url))
        serving.until_idle()
        metrics = httpx.get(serving.url + "/metrics").text
        assert httpx.get(serving.url + "/health").status_code == 200
    assert llm.engine.stats().drafter_failure == "RuntimeError: no kernel image is available"
    assert re.search(r"^fledge_\S*fallback\S* 1.0$", metrics, re.MULTILINE)
    plain = make_llm(speculative=False)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    messages = [[{"role": "user", "content": f"Hello {number}"}] for number in range(6)]
    assert found == [output.outputs[0].text for output in plain.chat(messages, params)]


class Process:
    """`fledge serve` in a process of its own. `forked`: a copy of this one, where its start is not the point."""

    def __init__(self, *options: str, forked: bool = False) -> None:
        root = pair_directory()
        speculation = json.dumps({"model": str(root / "drafter"), "num_speculative_tokens": 3, "adaptive": False})
        words = ["serve", str(root / "target"), "--speculative-config", speculation, "--served-model-name", MODEL]
        words += ["--port", "0", "--threads", "1", *options]
        command = [sys.executable, "-c", "from fledge.cli.main import run; run()", *words]
        self.process = (
            ForkedCommand(*words, cwd=root) if forked else subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        )
        self.lines: list[str] = []
        self.port = 0
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._is_ready.wait(120)
        assert self.port, f"the server does not start: {''.join(self.lines)}"
        self.url = f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        """Read the log as it is written: a server whose log nobody reads stands still."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                self._is_ready.set()
        self._is_ready.set()

    def memory(self) -> int:
        """Resident bytes, of the server and its engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        total = 0
        for pid in (self.process.pid, *children):
            found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            assert found is not None
            total += int(found[1]) * 1024
        return total

    def end(self) -> tuple[int, str]:
        """Wait for its end; return the exit status and the log."""
        status = self.process.wait(60)
        self._reader.join(10)
        return status, "".join(self.lines)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


async def read_stream(
    http: httpx.AsyncClient, started: asyncio.Event, tokens: int, admitted: asyncio.Event | None = None
) -> tuple[int, str | None]:
    """Return the number of tokens of a streamed answer, and the error that ended it.

    `admitted` is set when its headers come, `started` when its first token does.
    """
    count, error = 0, None
    body = {**LONG, "max_tokens": tokens, "stream": True, "return_token_ids": True}
    async with http.stream("POST", CHAT, json=body) as answer:
        if admitted is not None:
            admitted.set()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                started.set()
                event = json.loads(line[6:])
                error = event["error"]["code"] if "error" in event else error
                count += sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
    return count, error


def test_memory_stays_flat_and_sigterm_lets_running_streams_finish() -> None:
    with Process("--max-num-seqs", "8", "--log-format", "json") as server:
        for seed in (2, 3):
            storm(server.port, DROPPED, seed)  # what is allocated once is allocated by then
        before = server.memory()
        storm(server.port, DROPPED, seed=4)
        grown = server.memory() - before
        assert grown < 20 * 2**20, f"{grown / 2**20:.1f} MiB more after {DROPPED} connections"

        async def run() -> tuple[list[tuple[int, str | None]], httpx.Response, httpx.Response]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
                flags = [asyncio.Event() for _ in range(12)]  # more than run at once: some still wait
                started = asyncio.Event()
                streams = [asyncio.ensure_future(read_stream(http, started, 150, flag)) for flag in flags]
                await asyncio.gather(started.wait(), *(flag.wait() for flag in flags))
                server.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
                refused = await http.post(CHAT, json=LONG)
                health = await http.get("/health")
                return list(await asyncio.gather(*streams)), refused, health

        finished, refused, health = asyncio.run(run())
        assert finished == [(150, None)] * 12
        assert (refused.status_code, health.status_code) == (503, 503)
        assert refused.headers["retry-after"] == "5"
        status, log = server.end()
    assert status == 0, log
    assert "SIGTERM: finishing" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGINT, 128 + signal.SIGINT),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_server_that_is_stopped_while_it_loads_takes_its_engine_along(number: int, expected: int) -> None:
    root = pair_directory()
    command = ForkedCommand("serve", str(root / "target"), "--port", "0", "--threads", "1", cwd=root)
    assert any("the models are loaded" in line for line in command.stderr)
    command.send_signal(number)
    _, log = command.communicate(20)  # comes to its end with the last process that writes it
    assert command.returncode == expected
    assert log == ""


@pytest.mark.parametrize("again", [False, True])
def test_what_does_not_finish_in_time_or_meets_a_second_signal_is_cut_short(again: bool) -> None:
    with Process("--drain-timeout", "60" if again else "0.1", "--max-num-seqs", "2", forked=True) as server:

        async def run() -> list[tuple[int, str | None] | BaseException]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                started = asyncio.Event()
                streams = [asyncio.ensure_future(read_stream(http, started, 200)) for _ in range(30)]
                await started.wait()
                server.process.send_signal(signal.SIGTERM)
                if again:
                    await asyncio.sleep(0.1)
                    server.process.send_signal(signal.SIGTERM)
                return list(await asyncio.gather(*streams, return_exceptions=True))

        begun = time.monotonic()
        outcomes = asyncio.run(run())
        status, log = server.end()
        assert time.monotonic() - begun < 20
    assert status == 1, log
    cut = [outcome for outcome in outcomes if not isinstance(outcome, BaseException) and outcome[1] == "shutting_down"]
    assert cut
    assert "Traceback" not in log
