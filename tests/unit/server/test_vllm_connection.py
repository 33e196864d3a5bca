"""HTTP to a vLLM: bodies however they are cut, connections that are kept, closed by the other side, or broken."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fledge.server.async_vllm import AsyncVllm
from fledge.server.errors import RequestError
from fledge.server.vllm_connection import ChunkedBody, ProtocolError, SizedBody

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 1000])
def test_chunks_however_they_are_cut(cut: int) -> None:
    whole = b"5\r\nhello\r\n1;name=value\r\n\r\r\nA\r\n0\r\n6\r\n7\r\n8\r\n0\r\nTrailer: x\r\n\r\n"
    body = ChunkedBody()
    found = b"".join(body.read(whole[i : i + cut]) for i in range(0, len(whole), cut))
    assert (found, body.is_complete) == (b"hello\r0\r\n6\r\n7\r\n8", True)


@pytest.mark.parametrize("data", [b"-1\r\n", b"+5\r\nhello\r\n", b"0\r\n\r\nmore", b"x" * 70000, b""])
def test_what_are_no_chunks(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        ChunkedBody().read(data)


def test_a_length_is_kept_to() -> None:
    body = SizedBody(3)
    assert (body.read(b"ab"), body.is_complete, body.read(b"c"), body.is_complete) == (b"ab", False, b"c", True)
    for data in (b"", b"abcd"):
        with pytest.raises(ProtocolError):
            SizedBody(3).read(data)


def with_server(path: Path, behaviour: Behaviour, work: Callable[[AsyncVllm], Awaitable[Any]]) -> Any:
    """What `work` returns, beside a server that does as told with each connection."""

    async def run() -> Any:
        server = await asyncio.start_unix_server(behaviour, path / "socket")
        process: Any = SimpleNamespace(socket=str(path / "socket"))
        try:
            return await asyncio.wait_for(work(AsyncVllm(process, max_requests=4, metrics=None)), 10)  # type: ignore[arg-type]
        finally:
            server.close()

    return asyncio.run(run())


async def answer(vllm: AsyncVllm, body: bytes = b"") -> tuple[int, bytes]:
    found = await vllm.fetch("POST", b"/x", [(b"content-length", b"%d" % len(body))], body)
    return found.status, found.content


def test_a_connection_is_kept_until_vllm_closes_it_and_a_request_is_never_lost(tmp_path: Path) -> None:
    connections = 0

    async def two_answers_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for number in (b"1", b"2"):
            await reader.readuntil(b"\r\n\r\n")
            asked = await reader.readexactly(2)
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 3\r\n\r\n" + asked + number)
        await reader.readuntil(b"\r\n\r\n")  # the third is not answered: as if it had been closed a moment before
        writer.close()

    async def work(vllm: AsyncVllm) -> list[tuple[int, bytes]]:
        found = [await answer(vllm, b"%02d" % i) for i in range(4)]
        vllm._close_idle()
        return found

    answers = with_server(tmp_path, two_answers_each, work)
    assert answers == [(200, b"001"), (200, b"012"), (200, b"021"), (200, b"032")]
    assert connections == 2


@pytest.mark.parametrize(
    "sent",
    [
        b"",  # a new connection that is closed at once: nobody asks again
        b"HTTP/1.1 200",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        HEAD + b"Content-Length: 5\r\n\r\nabc",
        HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
)
def test_half_an_answer_is_an_error(tmp_path: Path, sent: bytes) -> None:
    connections = 0

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        writer.close()

    with pytest.raises(RequestError, match="vLLM has stopped working") as error:
        with_server(tmp_path, half, answer)
    assert (error.value.status, connections) == (500, 1)


def test_without_a_length_the_end_of_the_connection_is_that_of_the_body(tmp_path: Path) -> None:
    async def open_ended(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"\r\nhello")
        writer.close()

    assert with_server(tmp_path, open_ended, answer) == (200, b"hello")


def test_whoever_waits_is_told_why_it_ends(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b"POST /x HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
        writer.close()

    async def work(vllm: AsyncVllm) -> None:
        asyncio.get_running_loop().call_later(0.05, vllm.fail_all)
        await answer(vllm)

    with pytest.raises(RequestError, match="shutting down"):
        with_server(tmp_path, silent, work)


def test_nobody_there(tmp_path: Path) -> None:
    process: Any = SimpleNamespace(socket=str(tmp_path / "nothing"))
    with pytest.raises(RequestError, match="vLLM has stopped working") as error:
        asyncio.run(answer(AsyncVllm(process, max_requests=4, metrics=None)))  # type: ignore[arg-type]
    assert error.value.status == 503
