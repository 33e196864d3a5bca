"""An OpenAI-compatible server without a model, which behaves as badly as a test wants."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

Script = Callable[["OddServer", int, dict[str, Any]], AsyncIterator[bytes]]  # (server, request number, body) -> bytes
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def piece(text: str = "a ", finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}})


async def good(_server: "OddServer", _number: int, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """As it should be: `max_tokens` pieces, usage, the end."""
    count = body["max_tokens"]
    yield HEAD
    for i in range(count):
        yield piece(f"{i} ", "length" if i == count - 1 else None)
    yield usage(count) + event(b"[DONE]")


class OddServer:
    """`with OddServer(script) as server: ... server.url`. Plain HTTP/1.1, one request for each connection."""

    def __init__(self, script: Script = good, *, models: tuple[str, ...] = ("odd",), metrics: str = "") -> None:
        self.script = script
        self.models = models
        self.metrics = metrics
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[bytes] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.port = 0
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening: asyncio.Server | None = None
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "OddServer":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def die(self) -> None:
        """Stop to listen; called by scripts."""
        assert self._listening is not None
        self._listening.close()

    async def _run(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        self._listening.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *fields = head.split(b"\r\n")
            length = next((int(f.split(b":")[1]) for f in fields if f.lower().startswith(b"content-length:")), 0)
            content = await reader.readexactly(length)
            path = first.split()[1].decode()
            if path == "/v1/models":
                cards = [{"id": name, "owned_by": "odd"} for name in self.models]
                writer.write(self._whole(json.dumps({"data": cards})))
            elif path == "/metrics" and self.metrics:
                writer.write(self._whole(self.metrics))
            elif not path.endswith("/completions"):
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                await self._answer(json.loads(content), head, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, body: dict[str, Any], head: bytes, writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        self.headers.append(head)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            async for data in self.script(self, len(self.bodies) - 1, body):
                writer.write(data)
                await writer.drain()
        finally:
            self.in_flight -= 1

    @staticmethod
    def _whole(text: str) -> bytes:
        return f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode()
