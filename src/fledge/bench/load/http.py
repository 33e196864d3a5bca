"""HTTP/1.1 for a load generator: streams of many small pieces, with as little work for each as can be.

A load generator must not measure itself: aiohttp spends twice the CPU on a request, httpx twenty times (`docs/log.md`),
and neither is there on hosts that have torch and transformers alone. So this client knows what is needed here and no
more: no proxies, redirects, cookies, compression.
"""

import asyncio
import base64
import contextlib
import math
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

IDLE_SECONDS = 2.0  # less than any server keeps an idle connection, so that none is closed while a request goes out
CONNECT_SECONDS = 10.0
MAX_BYTES = 16 * 2**20  # of a chunk, or of an answer that is read whole
MAX_HEAD = 2**17
PORTS = {"http": 80, "https": 443}

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpError(Exception):
    """The exchange failed below the level of status codes. `connecting`: there was no connection to begin with."""

    def __init__(self, message: str, *, connecting: bool = False) -> None:
        super().__init__(message)
        self.connecting = connecting


def split_url(text: str) -> SplitResult:
    """Raises ValueError for what is no http or https address."""
    url = urlsplit(text)
    if url.scheme not in PORTS or not url.hostname or url.port == 0 or url.query or url.fragment:
        raise ValueError("no address of a server")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("odd characters")
    return url


@dataclass(kw_only=True)
class Response:
    """A status, headers with lower-case names, and a body that is yet to come."""

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader
    finished: bool = False  # read to its end

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        if self.headers.get("content-encoding", "identity") != "identity":
            raise HttpError(f"the answer is compressed ({self.headers['content-encoding']}), which was not asked for")
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := _length((await self.reader.readuntil(b"\r\n")).partition(b";")[0].decode("latin-1"), 16):
                if size > MAX_BYTES:
                    raise HttpError(f"a chunk of {size} bytes")
                yield (await self.reader.readexactly(size + 2))[:-2]
            while await self.reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
        else:
            left = _length(self.headers["content-length"], 10) if "content-length" in self.headers else math.inf
            while left and (data := await self.reader.read(int(min(left, 2**16)))):
                left -= len(data)
                yield data
            if 0 < left < math.inf:
                raise HttpError("the server closed the connection within an answer")
        self.finished = True

    async def whole(self) -> bytes:
        body = bytearray()
        async for data in self.parts():
            body += data
            if len(body) > MAX_BYTES:
                raise HttpError(f"an answer of more than {MAX_BYTES >> 20} MiB")
        return bytes(body)


@dataclass(kw_only=True)
class HttpClient:
    """Requests to one server, each on a connection of its own while it lasts. `close` it."""

    url: str  # what paths are appended to
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    _idle: list[tuple[float, Connection]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parts = split_url(self.url)
        self._ssl = ssl.create_default_context() if self._parts.scheme == "https" else None
        host = self._parts.netloc.rpartition("@")[2]
        headers = {"Host": host, "Accept-Encoding": "identity", **self.headers}
        if self._parts.username is not None and "Authorization" not in headers:
            user = f"{unquote(self._parts.username)}:{unquote(self._parts.password or '')}"
            headers["Authorization"] = "Basic " + base64.b64encode(user.encode()).decode()
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, content: bytes | None = None) -> AsyncIterator[Response]:
        """Send a request; yield the response once its head is there. Raises HttpError, and nothing else of its own."""
        kind = "" if content is None else f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        head = f"{method} {self._parts.path.rstrip('/')}/{path} HTTP/1.1\r\n{self._head}{kind}\r\n"
        reader, writer = await self._connection()
        reusable = False
        try:
            writer.write(head.encode("latin-1") + (content or b""))
            await writer.drain()
            response = await _response(reader)
            yield response
            framed = response.headers.keys() & {"transfer-encoding", "content-length"}
            closes = "close" in response.headers.get("connection", "").lower()
            reusable = response.finished and bool(framed) and not closes
        except asyncio.IncompleteReadError:
            raise HttpError("the server closed the connection") from None
        except asyncio.LimitOverrunError:
            raise HttpError("a line without an end") from None
        except OSError as error:
            raise HttpError(error.strerror or str(error) or type(error).__name__) from None
        finally:
            if reusable:
                self._idle.append((time.monotonic(), (reader, writer)))
            else:
                writer.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises HttpError, also when it takes too long."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS), self.request("GET", path) as response:
                return response.status, await response.whole()
        except TimeoutError:
            raise HttpError(f"no answer within {CONNECT_SECONDS:g} s") from None

    async def _connection(self) -> Connection:
        while self._idle:
            since, (reader, writer) = self._idle.pop()
            if time.monotonic() - since < IDLE_SECONDS and not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        port = self._parts.port or PORTS[self._parts.scheme]
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await asyncio.open_connection(self._parts.hostname, port, ssl=self._ssl, limit=MAX_HEAD)
        except TimeoutError:
            raise HttpError(f"no connection within {CONNECT_SECONDS:g} s", connecting=True) from None
        except (OSError, UnicodeError) as error:
            raise HttpError(getattr(error, "strerror", None) or str(error), connecting=True) from None

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1][1].close()


async def _response(reader: asyncio.StreamReader) -> Response:
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise HttpError(f"no HTTP: {first[:80]!r}")
        status = int(rest[:3])
        if status >= 200:  # others only announce it
            break
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return Response(status=status, headers=headers, reader=reader)


def _length(text: str, base: int) -> int:
    with contextlib.suppress(ValueError):
        if (length := int(text, base)) >= 0:
            return length
    raise HttpError(f"no length: {text[:80]!r}")
