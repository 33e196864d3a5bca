"""API keys: who may use the service."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request

from fledge.errors import ConfigError
from fledge.server.errors import RequestError


class ApiKeys:
    """The keys that open the service; none: it is open. Keys are kept as digests, and shown to nobody."""

    def __init__(self, keys: Sequence[str]) -> None:
        if not all(key.strip() for key in keys):
            raise ConfigError("--api-key: a key must not be empty")
        self._digests = tuple(_digest(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def match(self, key: str) -> bool:
        """Compare with every key, each in constant time: how long it takes says nothing about any of them."""
        offered, found = _digest(key), False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, offered)
        return found

    async def check(self, request: Request) -> None:
        """Raise RequestError (401) unless the request carries a key."""
        if not self._digests:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not self.match(key.strip()):
            raise RequestError(
                "this server needs an API key: send the header 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
