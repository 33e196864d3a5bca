"""The time a request may take: a whole response, or a stream of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, overload

from fledge.server.errors import RequestError
from fledge.server.generation import Generation


@overload
def limited(work: AsyncIterator[bytes], generation: Generation, seconds: float) -> AsyncIterator[bytes]: ...
@overload
def limited(work: Awaitable[dict[str, Any]], generation: Generation, seconds: float) -> Any: ...
def limited(work: Any, generation: Generation, seconds: float) -> Any:
    """Do `work` within so many seconds; when they are over, end the generation and raise RequestError (408)."""
    return _stream(work, generation, seconds) if isinstance(work, AsyncIterator) else _whole(work, generation, seconds)


async def _whole(work: Awaitable[Any], generation: Generation, seconds: float) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise _over(generation, seconds) from None


async def _stream(events: AsyncIterator[bytes], generation: Generation, seconds: float) -> AsyncIterator[bytes]:
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                part = await anext(events, None)
        except TimeoutError:
            raise _over(generation, seconds) from None
        if part is None:
            return
        yield part


def _over(generation: Generation, seconds: float) -> RequestError:
    generation.close("timeout")
    return RequestError(f"the request took longer than {seconds:g} s", status=408, code="timeout")
