"""What the HTTP server needs from either service: our own engine (`Service`) or a vLLM process (`VllmProxy`)."""

import logging
import time
from abc import ABC, abstractmethod
from typing import Any

from fledge.checkpoints.source import resolve
from fledge.errors import FledgeError
from fledge.evaluation.baseline import Baseline
from fledge.server.async_engine import AsyncEngine
from fledge.server.async_vllm import AsyncVllm
from fledge.server.errors import RequestError, shutting_down
from fledge.server.metrics import Metrics
from fledge.server.options import AdminKeys, ApiKeys, ServeOptions

_log = logging.getLogger("fledge.server")


class BaseService(ABC):
    """An engine and its settings. Created before the event loop; the application starts `engine` and calls `close`."""

    engine: AsyncEngine | AsyncVllm

    def __init__(self, options: ServeOptions, metrics: Metrics) -> None:
        self.options = options
        self.keys = ApiKeys(options.api_keys)
        self.admin_keys = AdminKeys(options.admin_api_keys)
        self.metrics = metrics
        self.is_draining = False
        self.body_bytes = 0  # total size of the request bodies that are being received
        self._loading_drafter: str | None = None

    def check_admission(self) -> None:
        """Raise RequestError if the server takes no new requests."""
        if self.is_draining:
            self.metrics.on_rejected("draining")
            raise shutting_down(retry_after=5)

    async def swap_drafter(self, model: str) -> dict[str, Any]:
        """Replace the drafter, one swap at a time; return the body of the response.

        Raises FledgeError if the drafter cannot be used; the present one stays.
        """
        started, previous = time.monotonic(), self.metrics.drafter
        try:
            if self._loading_drafter is not None:
                message = f"a drafter is being exchanged already, for {self._loading_drafter[:100]}; try again later"
                raise RequestError(message, status=409, code="swap_under_way", retry_after=5)
            self._loading_drafter = model
            try:
                await self._swap_drafter(model)
            finally:
                self._loading_drafter = None
        except FledgeError as error:
            self.metrics.on_swap_refused()
            _log.warning("drafting goes on with %s: %s", previous, error)
            raise
        return {"drafter": model, "previous": previous, "seconds": time.monotonic() - started}

    @abstractmethod
    async def _swap_drafter(self, model: str) -> None:
        """Load another drafter and use it. Raises FledgeError if that fails; the present one stays."""

    async def close(self) -> None:
        await self.engine.close()


def load_baseline(drafter: str | None) -> Baseline | None:
    """Return the baseline of a drafter's evaluation, None if it has none. A damaged file is only logged."""
    try:
        return None if drafter is None else Baseline.read(resolve(drafter))
    except FledgeError as error:
        _log.warning("%s; live traffic is not compared with it", error)
        return None
