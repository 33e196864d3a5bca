"""What a client may send at most, and how its JSON is read."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from fledge.server.errors import RequestError

BODY_SECONDS = 60.0
_CONTAINERS = (dict, list)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on requests. What they protect is other people's rounds, memory and the log."""

    max_body_bytes: int = 8 * 2**20
    max_nesting: int = 64
    max_answers: int = 128  # prompts times n
    max_n: int = 16
    max_messages: int = 2048
    max_stop_strings: int = 16
    max_stop_length: int = 256
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024
    max_template_bytes: int = 64 * 1024


async def read_json(request: Request, limits: Limits) -> dict[str, Any]:
    """Return the JSON object in a request's body. Raises RequestError for anything else."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # Anything else can be sent by a web page of another site without the browser asking us first.
        raise RequestError("the body must be JSON, with the header 'Content-Type: application/json'", status=415)
    body = await _read_body(request, limits.max_body_bytes)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    except (RecursionError, ValueError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not JSON that can be read here: {reason}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    _check_nesting(value, limits.max_nesting)
    if b"\\ud" in body or b"\\uD" in body:
        _check_characters(value)
    return value


async def _read_body(request: Request, most: int) -> bytes:
    def too_large() -> NoReturn:
        raise RequestError(f"the body is larger than {most} bytes", status=413, code="request_too_large")

    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and int(declared[:20]) > most:
        too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    too_large()
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {BODY_SECONDS:g} s", status=408, code="timeout") from None
    except ClientDisconnect:
        raise RequestError("the client has gone", status=400) from None
    return bytes(body)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _check_nesting(value: Any, most: int) -> None:
    """Refuse deep JSON, so that whatever walks it later can do so by recursion."""
    level = [value]
    for _ in range(most):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, _CONTAINERS)
        ]
        if not level:
            return
    raise RequestError(f"the body is nested more than {most} deep")


def _check_characters(value: Any) -> None:
    """Refuse halves of characters: JSON can spell them, UTF-8 and tokenizers cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body has half of a UTF-16 surrogate pair, which is no character") from None
