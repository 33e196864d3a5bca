"""Another drafter while the server runs: one at a time, told of in the log and in the metrics, whoever serves."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fledge.errors import FledgeError
from fledge.server.errors import RequestError
from fledge.server.metrics import Metrics

_log = logging.getLogger("fledge.server")


class DrafterSwap:
    """Has drafters exchanged. `exchange` raises FledgeError where one is no good, and the old one drafts on."""

    def __init__(self, metrics: Metrics, exchange: Callable[[str], Awaitable[None]]) -> None:
        self._metrics, self._exchange = metrics, exchange
        self._next: str | None = None  # that is being loaded

    async def run(self, model: str) -> dict[str, Any]:
        """Draft with another drafter from now on; return what to tell of it."""
        began, before = time.monotonic(), self._metrics.drafter
        try:
            if self._next is not None:
                message = f"a drafter is being exchanged already, for {self._next[:100]}; try again later"
                raise RequestError(message, status=409, code="swap_under_way", retry_after=5)
            self._next = model
            try:
                await self._exchange(model)
            finally:
                self._next = None
        except FledgeError as error:
            self._metrics.on_swap_refused()
            _log.warning("drafting goes on with %s: %s", before, error)
            raise
        return {"drafter": model, "previous": before, "seconds": time.monotonic() - began}
