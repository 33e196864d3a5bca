"""A minimal HTTP/1.1 client for vLLM over a Unix socket, with keep-alive. Bodies are streamed as bytes.

Bodies of responses may have a Content-Length, be chunked, or end with the connection.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from fledge.server.errors import RequestError

DEAD = "vLLM has stopped working; see the server's log"
READ_BYTES = 1 << 18
_LINE_BYTES = 1 << 16
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?")  # extensions are ignored
HeaderList = Sequence[tuple[bytes, bytes]]


class ProtocolError(Exception):
    """The response is not valid HTTP, or incomplete."""


class SizedBody:
    """A body with a Content-Length; if that is None, it ends with the connection."""

    def __init__(self, length: int | None) -> None:
        self._left = length

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    def read(self, data: bytes) -> bytes:
        """Return the part of the body in `data`; empty data means the end of the connection. Raises ProtocolError."""
        if self._left is None:
            self._left = None if data else 0
        elif not data or len(data) > self._left:
            raise ProtocolError
        else:
            self._left -= len(data)
        return data


class ChunkedBody:
    """A body with chunked transfer encoding."""

    def __init__(self) -> None:
        self.is_complete = False
        self._line = b""  # the beginning of an incomplete line
        self._left = 0  # bytes of the chunk and of the CRLF after it
        self._is_trailer = False

    def read(self, data: bytes) -> bytes:
        """As `SizedBody.read`."""
        if not data:
            raise ProtocolError
        found, data, self._line = [], self._line + data, b""
        while data and not self.is_complete:
            if self._left:
                part, data = data[: self._left], data[self._left :]
                self._left -= len(part)
                found.append(part[: max(len(part) - 2 + min(self._left, 2), 0)])
                continue
            line, end, rest = data.partition(b"\r\n")
            if not end:
                self._line, rest = line, b""
            else:
                self._read_line(line)
            data = rest
        if data or len(self._line) > _LINE_BYTES:
            raise ProtocolError
        return b"".join(found)

    def _read_line(self, line: bytes) -> None:
        if self._is_trailer:
            self.is_complete = not line
        elif (size := _CHUNK_SIZE.fullmatch(line)) is None:
            raise ProtocolError
        elif int(size[1], 16):
            self._left = int(size[1], 16) + 2
        else:
            self._is_trailer = True


class VllmResponse(NamedTuple):
    """A complete response."""

    status: int
    headers: HeaderList
    content: bytes


class VllmConnection:
    """A connection, with one request and its response at a time. Used by one reader."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: HeaderList = ()  # of the response, names in lower case
        self._reader = reader
        self._writer = writer
        self._body: SizedBody | ChunkedBody = SizedBody(None)
        self._is_last = False  # vLLM closes the connection after this response
        self._error: RequestError | None = None

    @classmethod
    async def open(cls, socket: str) -> "VllmConnection":
        """Connect to a Unix socket. Raises OSError."""
        return cls(*await asyncio.open_unix_connection(socket, limit=2 * READ_BYTES))

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent: the last response is complete, and the connection is open."""
        is_closed = self._reader.at_eof() or self._writer.is_closing()
        return self._body.is_complete and not self._is_last and not is_closed

    async def request(self, method: str, target: bytes, headers: HeaderList, body: bytes) -> bool:
        """Send a request and read the head of the response. False: vLLM had closed the connection; try another.

        Raises RequestError if vLLM dies, or if this connection is aborted.
        """
        self.status, self._body = 0, SizedBody(None)
        lines = [b"%s %s HTTP/1.1" % (method.encode(), target), *(b"%s: %s" % header for header in headers), b"", body]
        self._writer.write(b"\r\n".join(lines))  # in one system call
        try:
            while self.status < 200:  # 1xx come before the final response
                self._read_head(await self._reader.readuntil(b"\r\n\r\n"))
        except (OSError, asyncio.IncompleteReadError) as error:
            if self._error is None and not self.status and not getattr(error, "partial", b""):
                return False
            raise self._failure() from None
        except (ProtocolError, asyncio.LimitOverrunError):
            raise self._failure() from None
        if method == "HEAD" or self.status in (204, 304):
            self._body = SizedBody(0)
        return True

    def _read_head(self, head: bytes) -> None:
        first, *lines = head[:-4].split(b"\r\n")
        version, _, status = first.partition(b" ")
        pairs = [line.partition(b":") for line in lines]
        self.headers = [(name.lower(), value.strip(b" \t")) for name, _, value in pairs]
        named = dict(self.headers)
        length = named.get(b"content-length", b"")
        if version not in (b"HTTP/1.1", b"HTTP/1.0") or not status[:3].isdigit() or (length and not length.isdigit()):
            raise ProtocolError
        self.status = int(status[:3])
        self._is_last = version == b"HTTP/1.0" or named.get(b"connection", b"").lower() == b"close"
        is_chunked = named.get(b"transfer-encoding", b"").lower() == b"chunked"
        self._body = ChunkedBody() if is_chunked else SizedBody(int(length) if length else None)

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body in parts as they arrive. Raises RequestError if it is incomplete."""
        while not self._body.is_complete:
            try:
                part = self._body.read(await self._reader.read(READ_BYTES))
            except (OSError, ProtocolError):
                raise self._failure() from None
            if part:
                yield part

    async def read(self) -> VllmResponse:
        """Read the body to its end and return the response."""
        content = b"".join([part async for part in self.parts()])
        return VllmResponse(self.status, self.headers, content)

    def abort(self, error: RequestError | None = None) -> None:
        """Close the connection, which aborts the request in vLLM. The reader gets `error`."""
        self._error = self._error or error
        self._writer.transport.abort()

    def _failure(self) -> RequestError:
        return self._error or RequestError(DEAD, status=500, code="generation_failed")
