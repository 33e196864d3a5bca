"""HTTP to a vLLM that runs: at a Unix socket of this machine, or at a URL. Blocking, and without any library."""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from fledge.errors import ConfigError, FledgeError

CONNECT_SECONDS = 10.0


class VllmError(FledgeError):
    """vLLM refused a request, or is gone."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # of HTTP; None: nobody answered


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class VllmClient:
    """Asks one vLLM. May be used by several threads: every request has a connection of its own."""

    def __init__(self, address: str, *, api_key: str | None = None) -> None:
        """`address`: a URL such as http://host:8000, or unix:/path/of/a/socket."""
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https", "unix") or not (
            parts.path if parts.scheme == "unix" else parts.netloc
        ):
            raise ConfigError(f"{address}: expected the address of a vLLM, such as http://127.0.0.1:8000")
        self.address = address
        self._parts = parts
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def connect(self, timeout: float | None = None) -> http.client.HTTPConnection:
        """Return a connection that has not been opened yet. `timeout`: seconds without a byte."""
        if self._parts.scheme == "unix":
            return _UnixConnection(self._parts.path, timeout)
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.netloc, timeout=timeout)

    def is_ready(self) -> bool:
        """Whether it answers, and says that it is well."""
        try:
            self.get("/health", timeout=CONNECT_SECONDS)
        except VllmError:
            return False
        return True

    def get(self, path: str, *, timeout: float | None = CONNECT_SECONDS) -> bytes:
        connection = self.connect(timeout)
        try:
            return self._begin(connection, "GET", path, None).read()
        except (OSError, http.client.HTTPException) as error:
            raise VllmError(f"vLLM does not answer: {error}") from None
        finally:
            connection.close()

    def get_json(self, path: str) -> Any:
        return json.loads(self.get(path))

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float | None = None) -> Any:
        """Return the JSON of an answer. Raises VllmError for what is refused."""
        connection = self.connect(timeout)
        try:
            return json.loads(self._begin(connection, "POST", path, body).read())
        except (OSError, http.client.HTTPException) as error:
            raise VllmError(f"vLLM does not answer: {error}") from None
        finally:
            connection.close()

    def stream(
        self, path: str, body: Mapping[str, Any], *, connection: http.client.HTTPConnection | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream, the last one left out. Closing `connection` ends the request at vLLM too."""
        connection = connection or self.connect()
        try:
            response = self._begin(connection, "POST", path, {**body, "stream": True})
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise VllmError(_message(event), 500)
                    yield event
            raise VllmError("vLLM ended a stream in the middle")
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:  # closed under our hands, too
            raise VllmError(f"vLLM does not answer: {error}") from None
        finally:
            connection.close()

    def _begin(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, **({} if body is None else {"Content-Type": "application/json"})}
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        if response.status >= 400:
            raise VllmError(f"vLLM: {error_message(response.read()) or response.reason}", response.status)
        return response


def error_message(content: bytes) -> str:
    """The words of a refusal, on one line; empty: there are none."""
    try:
        return _message(json.loads(content))
    except ValueError:
        return ""


def _message(body: Any) -> str:
    """The words of an error, on one line."""
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())
