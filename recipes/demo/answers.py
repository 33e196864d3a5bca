"""A model that answers many prompts at a time while it is in training: Fledge's engine, with weights that change.

One process leaves a GPU waiting for its Python: eight of them under NVIDIA's MPS answer about four times as fast.
"""

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fledge import LLM, SamplingParams
from fledge.checkpoints.target import load_target
from fledge.errors import FledgeError
from recipes.demo import jsonlines

KV_CACHE_BYTES = 4 << 30  # for each of several processes: free memory tells none what the others will take


class Answer(NamedTuple):
    prompt: list[int]
    ids: list[int]  # its end token included, where it ended
    text: str
    ended: bool  # by itself, before the limit


class Engine:
    """The engine, in this process."""

    def __init__(self, folder: Path, max_tokens: int, device: str = "auto", share: int | None = None) -> None:
        self.options = {"device": device, "max_num_seqs": 512, "enable_prefix_caching": False}
        if share is not None and torch.cuda.is_available():
            self.options["kv_cache_bytes"] = share
        elif torch.cuda.is_available():
            self.options["gpu_memory_utilization"] = 0.3  # training needs the rest
        self.llm, self.max_tokens = LLM(folder, **self.options), max_tokens

    def update(self, folder: Path) -> None:
        """Take over other weights: in place on a GPU, where what was captured reads the same memory."""
        parameters = list(self.llm.target.parameters())
        if parameters[0].device.type != "cuda":
            self.llm = LLM(folder, **self.options)
            return
        fresh = load_target(folder, dtype=parameters[0].dtype, device="cpu")
        with torch.no_grad():
            for old, new in zip(parameters, fresh.parameters(), strict=True):
                old.copy_(new)

    def answer(self, prompts: Sequence[list[int]], temperatures: Sequence[float], seed: int) -> list[Answer]:
        params = [
            SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=seed + number)
            for number, temperature in enumerate(temperatures)
        ]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        said = [output.outputs[0] for output in outputs]
        return [
            Answer(ids, list(one.token_ids), one.text, one.finish_reason == "stop")
            for ids, one in zip(prompts, said, strict=True)
        ]


class Engines:
    """One engine here, or several in processes of their own that share the work."""

    def __init__(self, folder: Path, max_tokens: int, processes: int = 1, device: str = "auto") -> None:
        self.pipes: list[Any] = []
        if processes == 1:
            self.engine = Engine(folder, max_tokens, device)
            return
        spawned = multiprocessing.get_context("spawn")
        for _ in range(processes):
            ours, theirs = spawned.Pipe()
            spawned.Process(target=_serve, args=(theirs, folder, max_tokens, device), daemon=True).start()
            theirs.close()
            self.pipes.append(ours)

    def _ask(self, method: str, parts: Sequence[tuple[Any, ...]]) -> list[Any]:
        for pipe, arguments in zip(self.pipes, parts, strict=True):
            pipe.send((method, arguments))
        try:
            said = [pipe.recv() for pipe in self.pipes]
        except EOFError:
            jsonlines.fail("a process that answers has ended; lower --processes if memory was short")
        for one in said:
            if isinstance(one, FledgeError):
                jsonlines.fail(str(one))
        return said

    def update(self, folder: Path) -> None:
        """Take over other weights."""
        if not self.pipes:
            self.engine.update(folder)
            return
        self._ask("update", [(folder,)] * len(self.pipes))

    def answer(self, prompts: Sequence[list[int]], temperatures: Sequence[float] = (), seed: int = 0) -> list[Answer]:
        """Answer each prompt, greedily unless `temperatures` has another for each."""
        temperatures = list(temperatures) or [0.0] * len(prompts)
        if not self.pipes:
            return self.engine.answer(prompts, temperatures, seed)
        count = len(self.pipes)
        parts = [(list(prompts[i::count]), temperatures[i::count], seed + i * len(prompts)) for i in range(count)]
        found: list[Answer] = [Answer([], [], "", ended=False)] * len(prompts)
        for i, part in enumerate(self._ask("answer", parts)):
            found[i::count] = part
        return found


def _serve(pipe: Any, folder: Path, max_tokens: int, device: str) -> None:
    """Do what is asked until nobody asks any more."""
    try:
        engine = Engine(folder, max_tokens, device, KV_CACHE_BYTES)
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(engine, method)(*arguments))
    except EOFError:
        pass
    except FledgeError as error:
        pipe.send(error)
