"""What the HTTP server needs of what it serves: our own engine (`Service`), or a vLLM (`VllmProxy`)."""

import logging
from abc import ABC, abstractmethod

from fledge.checkpoints.source import resolve
from fledge.errors import FledgeError
from fledge.evaluation.baseline import Baseline
from fledge.server.async_engine import AsyncEngine
from fledge.server.async_vllm import AsyncVllm
from fledge.server.errors import shutting_down
from fledge.server.metrics import Metrics
from fledge.server.options import AdminKeys, ApiKeys, ServeOptions
from fledge.server.swap import DrafterSwap

_log = logging.getLogger("fledge.server")


class Servable(ABC):
    """A model behind endpoints. Made before there is an event loop; start its engine in one, `close` at the end."""

    engine: AsyncEngine | AsyncVllm

    def __init__(self, options: ServeOptions, metrics: Metrics) -> None:
        self.options = options
        self.keys = ApiKeys(options.api_keys)
        self.admin_keys = AdminKeys(options.admin_api_keys)
        self.metrics = metrics
        self.swap = DrafterSwap(metrics, self._exchange_drafter)
        self.is_draining = False
        self.body_bytes = 0  # of requests that are being read, all together

    def admit(self) -> None:
        """Raise RequestError while the server takes no new work."""
        if self.is_draining:
            self.metrics.on_rejected("draining")
            raise shutting_down(retry_after=5)

    @abstractmethod
    async def _exchange_drafter(self, model: str) -> None:
        """Draft with another drafter from now on. Raises FledgeError where that cannot be; the old one stays."""

    async def close(self) -> None:
        await self.engine.close()


def baseline_of(drafter: str | None) -> Baseline | None:
    """Return the baseline of a drafter's evaluation, if there is one. A damaged file is logged; serving goes on."""
    try:
        return None if drafter is None else Baseline.read(resolve(drafter))
    except FledgeError as error:
        _log.warning("%s; live traffic is not compared with it", error)
        return None
