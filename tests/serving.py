"""A service on a tiny pair, on a port of its own, in a thread: for tests that speak HTTP to it.

Its engine runs in a thread too, where tests can look into it; everything between is what `fledge serve` has, pipes
included. tests/unit/server/test_engine_process.py and tests/e2e/test_serve_load.py run the real process.
"""

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from fledge import LLM
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.models.drafter.variants import EAGLE_3_1
from fledge.server.app import DrainingServer, http_config
from fledge.server.child import Child
from fledge.server.engine_process import EngineProcess, EngineWorker
from fledge.server.options import ServeOptions
from fledge.server.service import Service
from tests.shared_directory import shared_directory
from tests.tiny_models import TINY_TARGET, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

_T = TypeVar("_T")

MODEL = "tiny"
MAX_MODEL_LEN = 256


@functools.cache
def pair_directory() -> Path:
    """Return a directory with `target` and `drafter`: random weights, bytes for tokens."""
    root = shared_directory("pair")
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,), max_positions=MAX_MODEL_LEN)
    target = make_target(config)
    save_target(target, root / "target")
    save_tokenizer(root / "target")
    save_drafter(make_drafter(EAGLE_3_1.config_for(config), target), root / "drafter")
    return root


def make_llm(*, speculative: bool = True, **options: Any) -> LLM:
    root = pair_directory()
    speculation = {"model": str(root / "drafter"), "num_speculative_tokens": 3, "adaptive": False}
    config = speculation if speculative else None
    return LLM(root / "target", speculative_config=config, **{"max_num_seqs": 16, **options})


class LockedEngine:
    """An engine that tests may look into between two of its calls."""

    def __init__(self, engine: Any) -> None:
        self.inner = engine
        self.lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not callable(value) or name == "prepare_drafter":  # which may run beside steps
            return value

        def locked(*arguments: Any, **named: Any) -> Any:
            with self.lock:
                return value(*arguments, **named)

        return locked


class EngineThread(EngineProcess):
    """The engine of an `LLM` at the other end of the pipes, in a thread instead of a process."""

    def __init__(self, llm: LLM) -> None:
        self.engine = LockedEngine(llm.engine)
        self._tokenizer = llm.tokenizer
        super().__init__({}, child=Child(start=self._start))
        self.tokenizer, self.info = llm.tokenizer, llm.engine.info
        assert self._ready.wait(30)

    def _start(self, commands: int, outputs: int, **_: Any) -> "EngineThread":
        ready = self._ready = threading.Event()

        def work() -> None:
            with Connection(commands, writable=False) as reader, Connection(outputs, readable=False) as writer:
                reader.recv()  # the settings
                ready.set()
                EngineWorker(self.engine, self._tokenizer, reader, writer).run()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        return self

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def call(self, function: Callable[[Any], _T]) -> _T:
        """Run a function with the engine, between two steps."""
        with self.engine.lock:
            return function(self.engine.inner)


def make_service(llm: LLM | None = None, **options: Any) -> Service:
    settings = ServeOptions(**{"served_model_names": (MODEL, "alias"), **options})
    return Service(EngineThread(llm or make_llm()), settings)


class Serving:
    """A running server. `with Serving(...) as serving: httpx.get(serving.url + "/health")`."""

    def __init__(self, service: Any = None) -> None:
        """`service`: a `Service` or a `VllmProxy`."""
        self.service = service or make_service()
        config = http_config(self.service, host="127.0.0.1", port=0)
        self._ready = threading.Event()
        self.port = 0
        self.server = DrainingServer(config, self.service, self._is_ready)
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Serving":
        self._thread.start()
        assert self._ready.wait(30), "the server does not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server does not stop"

    def in_engine(self, function: Callable[[Any], _T]) -> _T:
        """Run a function with the engine, between two steps."""
        process = self.service.engine.process
        assert isinstance(process, EngineThread)
        return process.call(function)

    def until_idle(self, seconds: float = 30) -> None:
        """Wait until the engine has nothing to do, then check that nothing is left behind."""
        deadline = time.monotonic() + seconds
        while self.service.engine.active or self.in_engine(lambda engine: engine.has_unfinished):
            assert time.monotonic() < deadline, "the engine does not come to rest"
            time.sleep(0.01)
        self.in_engine(lambda engine: engine.check_integrity())
        assert self.service.engine.active == 0

    def _is_ready(self, port: int) -> None:
        self.port = port
        self._ready.set()
