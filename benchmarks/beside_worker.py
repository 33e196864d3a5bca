"""One engine in a process of its own, for beside_vllm.py: it is asked in lines of JSON, and answers so.

Run as a program it is that process, in a Python that has Fledge or vLLM, and imports nothing of the other.
"""

import gc
import hashlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol, TextIO


class WorkerError(RuntimeError):
    """It died or is too slow: one line, and the end of its log."""


class Worker:
    """The process, seen from outside. `late` ones start when they are first asked."""

    def __init__(
        self, title: str, python: str, setup: dict[str, Any], env: dict[str, str], logs: Path, *, late: bool
    ) -> None:
        self.late = late
        self._command = [python, str(Path(__file__).resolve()), json.dumps(setup)]
        self._env = {**os.environ, **env}
        self._log = logs / f"{title}.log"
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self._ready: dict[str, Any] | None = None  # what it said when it was
        if not late:
            self._start()

    def _start(self) -> None:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._env,
                start_new_session=True,  # vLLM has children of its own
            )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_until_ready(self, seconds: float) -> dict[str, Any]:
        """Its version, and how long its start took by its own clock."""
        if self._ready is None:
            self._ready = self._answer(seconds)
        return self._ready

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        if self._process is None:
            self._start()
        ready = self.wait_until_ready(seconds)
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is dead, which its log explains
        return {**self._answer(seconds), **ready}

    def _answer(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + max(seconds, 1.0)
        while time.monotonic() < until:
            try:
                line = self._lines.get(timeout=0.5)
            except queue.Empty:
                if self._process is not None and self._process.poll() is None:
                    continue
                line = None  # children of a dead one may still hold its end of the pipe
            if line is None:
                raise WorkerError(self._story("it has ended"))
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.close()
        raise WorkerError(self._story(f"no answer after {max(seconds, 1.0):.0f} s"))

    def _story(self, what: str) -> str:
        tail = self._log.read_text(errors="replace").splitlines()[-15:] if self._log.exists() else []
        return "\n    ".join([what, *tail])

    def close(self) -> None:
        """End it and what it has started."""
        if self._process is None:
            return
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, kind)
                self._process.wait(timeout=5)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue


class Contender(Protocol):
    """An engine, as the loop sees it."""

    version: str

    def draft(self, depth: int) -> None: ...

    def add(self, name: str, ids: list[int], max_tokens: int, *, ignore_eos: bool) -> None: ...

    def step(self) -> list[tuple[str, list[int]]]:
        """The requests that have ended, with their tokens."""
        ...

    def acceptance_length(self) -> float | None:
        """Since it was last asked for."""
        ...


class Fledge:
    """Ours: one target, drafting as deep as is asked for. The engine is built anew for each depth, while nothing else
    runs, since it times what it does; it was built once before, so that kernels are compiled. Then it captures what it
    would while idle, for `AHEAD_SECONDS` at most.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        from fledge import LLM, __version__  # noqa: PLC0415

        self.version = __version__
        self._seen: list[Any] = []
        self._tokens: dict[str, list[int]] = {}
        self._drafter, self._is_random = setup["drafter"], setup["is_random"]
        self._ahead_seconds = setup["ahead_seconds"]
        self._depth: int | None = None
        options: dict[str, Any] = {
            "max_num_seqs": setup["max_num_seqs"],
            "max_model_len": setup["max_model_len"],
            "kv_cache_bytes": setup["kv_cache_bytes"],
            "enable_prefix_caching": False,
        }
        if self._is_random:
            self.llm = LLM.from_engine(random_engine(setup["target"], options))
            return
        self.llm = LLM(setup["target"], dtype="float32" if setup["cpu"] else "bfloat16", **options)
        for depth in setup["depths"]:
            if depth:
                self._build(depth)

    def _build(self, depth: int) -> None:
        drafts = {"model": self._drafter, "num_speculative_tokens": depth}
        self.llm.set_speculation(drafts if depth else None)

    def draft(self, depth: int) -> None:
        if depth == self._depth:
            return
        began = time.monotonic()
        if not self._is_random:
            self._build(depth)
        self._depth = depth
        built = time.monotonic()
        while (more := self.llm.engine.work_ahead()) and time.monotonic() - built < self._ahead_seconds:
            pass
        took, rest = time.monotonic() - built, "there is more" if more else "nothing is left"
        graphs = self.llm.engine.runner.graphs
        count = 0 if graphs is None else len(graphs.captured)
        words = f"K={depth}: built and warmed up in {built - began:.1f} s, worked ahead for {took:.1f} s"
        print(f"{words} ({rest}), {count} graphs", file=sys.stderr, flush=True)

    def add(self, name: str, ids: list[int], max_tokens: int, *, ignore_eos: bool) -> None:
        from fledge import SamplingParams  # noqa: PLC0415

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        self.llm.engine.add_request(name, ids, params, seed=1, eos_ids=self.llm.eos_ids)
        self._tokens[name] = []

    def step(self) -> list[tuple[str, list[int]]]:
        ended = []
        for update in self.llm.engine.step():
            self._tokens[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                if update.finish_reason not in ("stop", "length"):
                    raise RuntimeError(f"a request ended with {update.finish_reason}: {update.error}")
                if update.metrics is not None:
                    self._seen.append(update.metrics.acceptance)
                ended.append((update.request_id, self._tokens.pop(update.request_id)))
        return ended

    def acceptance_length(self) -> float | None:
        from fledge.decoding.statistics import AcceptanceStatistics  # noqa: PLC0415

        found = AcceptanceStatistics.merge([one for one in self._seen if one is not None])
        self._seen = []
        return found.acceptance_length


def random_engine(shape: str, options: dict[str, Any]) -> Any:
    """An engine on random weights of a shape, without a drafter."""
    import torch  # noqa: PLC0415

    from fledge.bench.rounds import make_pair  # noqa: PLC0415
    from fledge.engine.config import EngineConfig  # noqa: PLC0415
    from fledge.engine.engine import LLMEngine  # noqa: PLC0415

    on_gpu = torch.cuda.is_available()
    dtype, device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    target, _ = make_pair(shape, dtype, torch.device(device))
    engine = LLMEngine(target, None, EngineConfig(**options))
    engine.warm_up()
    return engine


class Vllm:
    """vLLM with its defaults, but for the room of keys and values, since several engines share the GPU's memory."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from vllm import LLM, __version__  # noqa: PLC0415

        self.version = __version__
        (depth,) = setup["depths"]
        options: dict[str, Any] = {"dtype": "float32" if setup["cpu"] else "bfloat16"}
        options |= {name: setup[name] for name in ("max_num_seqs", "max_model_len")}
        if setup["cpu"]:
            options["enforce_eager"] = True  # compiling takes minutes there
        else:
            # The least share: what is asked for must be free at the start, and is not what is taken.
            options |= {"kv_cache_memory_bytes": setup["kv_cache_bytes"], "gpu_memory_utilization": 0.02}
        if setup["is_random"]:
            options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        if depth:
            drafts = {"method": "eagle3", "model": setup["drafter"], "num_speculative_tokens": depth}
            options["speculative_config"] = drafts
        self.llm = LLM(model=setup["target"], enable_prefix_caching=False, disable_log_stats=False, **options)
        self._counted = (0, 0)
        self._drafts = bool(depth)

    def draft(self, depth: int) -> None: ...

    def add(self, name: str, ids: list[int], max_tokens: int, *, ignore_eos: bool) -> None:
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, params)

    def step(self) -> list[tuple[str, list[int]]]:
        return [(o.request_id, list(o.outputs[0].token_ids)) for o in self.llm.llm_engine.step() if o.finished]

    def acceptance_length(self) -> float | None:
        if not self._drafts:
            return None
        values = {one.name: getattr(one, "value", 0) for one in self.llm.get_metrics()}
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        counted = (values.get(names[0], 0), values.get(names[1], 0))
        rounds, accepted = (new - old for new, old in zip(counted, self._counted, strict=True))
        self._counted = counted
        return 1 + accepted / rounds if rounds else None


def closed_loop(
    engine: Contender,
    prompts: list[list[int]],
    *,
    concurrency: int,
    first: int,
    requests: int,
    max_tokens: int,
    stride: int = 1,
    ignore_eos: bool = False,
) -> dict[str, Any]:
    """Keep `concurrency` in flight until so many have been answered: every `stride`th prompt from `first` on."""
    in_flight: dict[str, float] = {}
    answers: dict[str, list[int]] = {}
    rates: list[float] = []
    sent = 0
    engine.acceptance_length()
    began = time.perf_counter()
    while sent < requests or in_flight:
        while sent < requests and len(in_flight) < concurrency:
            name = str(sent)
            in_flight[name] = time.perf_counter()
            engine.add(name, prompts[(first + sent * stride) % len(prompts)], max_tokens, ignore_eos=ignore_eos)
            sent += 1
        for name, tokens in engine.step():
            rates.append(len(tokens) / (time.perf_counter() - in_flight.pop(name)))
            answers[name] = tokens
    seconds = time.perf_counter() - began
    total = sum(map(len, answers.values()))
    length = engine.acceptance_length()
    by_step = list(zip(*answers.values(), strict=False))  # tokens at the same place of all answers
    text = json.dumps([answers[str(number)] for number in range(requests)])
    return {
        "user_tokens_per_second": round(statistics.mean(rates), 2),
        "tokens_per_second": round(total / seconds, 1),
        "acceptance_length": None if length is None else round(length, 3),
        "requests": requests,
        "tokens": total,
        "seconds": round(seconds, 4),
        # Random models that all say the same read fewer experts: how many of the tokens at one place are different.
        "distinct": round(statistics.mean(len(set(step)) / len(step) for step in by_step), 3) if by_step else None,
        "digest": hashlib.sha256(text.encode()).hexdigest()[:12],
    }


def serve(setup: dict[str, Any], questions: TextIO, answers: TextIO) -> None:
    began = time.monotonic()
    prompts = json.loads(Path(setup["prompts"]).read_text())
    engine: Contender = Fledge(setup) if setup["engine"] == "fledge" else Vllm(setup)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say({"version": engine.version, "start_seconds": round(time.monotonic() - began, 1)})
    for line in questions:
        question = json.loads(line)
        engine.draft(question.pop("depth"))
        gc.collect()
        gc.freeze()  # as servers do: looking through what stays holds everybody up
        say(closed_loop(engine, prompts, **question))


if __name__ == "__main__":
    # What engines print belongs into the log; answers have a descriptor of their own.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]), sys.stdin, channel)
