"""Where a probe's text and the target's states come from: a target that is loaded here, or one that vLLM runs.

    OwnSource         our engine decodes with the drafter: text, rounds; one more pass of the target: states
    CapturedSource    vLLM decodes without it: text; its connector: states; the rounds follow from text and drafts

The second never loads the target: of its checkpoint only embedding, final norm and head are read. A round drafts what
follows from the verified text before it, and the target's choices are the text; so the rounds that speculation would
have taken are known without taking them.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from fledge.checkpoints.contract import check
from fledge.checkpoints.drafter import load_drafter, raise_errors
from fledge.checkpoints.reading import read_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target, read_target_config, stop_ids, weights_digest
from fledge.decoding.params import SamplingParams
from fledge.devices import DTYPES, choose_device, choose_dtype
from fledge.drift.replay import target_states
from fledge.engine.config import MAX_DEPTH
from fledge.engine.llm import LLM
from fledge.engine.outputs import RequestOutput
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.errors import ConfigError, PromptError
from fledge.models.config import TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetStates
from fledge.vllm_process.client import VllmClient
from fledge.vllm_states import hosts as servers
from fledge.vllm_states.files import CapturedLayers, StateFiles, StateReader

CONCURRENCY = 32  # requests at once, at each vLLM
MAX_BYTES = 4 << 30  # of states that are written and not yet read


class Source(Protocol):
    """What a `Prober` asks of whoever has the target. It has a drafter, which can be exchanged."""

    tokenizer: Any | None
    max_model_len: int
    vocab_size: int

    @property
    def drafter(self) -> Drafter: ...

    @property
    def drafting_depth(self) -> int:
        """Of the rounds that it tells, or that follow from the text."""
        ...

    @property
    def tells_rounds(self) -> bool:
        """Whether its outputs have rounds; else they follow from the text."""
        ...

    def exchange(self, drafter: str) -> None: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...

    def states(self, texts: Iterable[Sequence[int]]) -> Iterator[TargetStates]:
        """What the drafter reads of each text, [tokens, ...] each, in this order."""
        ...

    def close(self) -> None: ...


class OwnSource:
    """A target of ours, which stays loaded while drafters are exchanged."""

    tells_rounds = True

    def __init__(self, target: str, drafter: str, depth: int, options: Mapping[str, Any]) -> None:
        self._depth = min(depth, MAX_DEPTH)
        # The replay needs memory of its own, beside the engine's cache.
        given = {"gpu_memory_utilization": 0.6, **options}
        self.llm = LLM(target, speculative_config=self._speculation(drafter), **given)
        self.tokenizer, self.max_model_len = self.llm.tokenizer, self.llm.max_model_len
        self.vocab_size = self.llm.target.config.vocab_size

    def _speculation(self, drafter: str) -> dict[str, Any]:
        return {"model": drafter, "num_speculative_tokens": self._depth, "adaptive": False}

    def exchange(self, drafter: str) -> None:
        self.llm.set_speculation(self._speculation(drafter))

    @property
    def drafter(self) -> Drafter:
        config = self.llm.config
        assert not config.drafts_trees
        assert not config.sample_drafts
        assert self.llm.drafter is not None
        return self.llm.drafter

    @property
    def drafting_depth(self) -> int:
        return self.llm.config.max_depth

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        return self.llm.generate(prompts, sampling_params, progress=progress)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.llm.encode_chat(messages)

    def states(self, texts: Iterable[Sequence[int]]) -> Iterator[TargetStates]:
        for tokens in texts:
            yield target_states(self.llm.target, tokens, self.drafter.aux_layer_ids)

    def close(self) -> None:
        self.llm.close()


@dataclass(frozen=True, kw_only=True)
class VllmServers:
    """The vLLM that runs the target: at `urls`, or started here. It writes states to `storage`."""

    drafters: tuple[str, ...]  # all that will be probed: one server has the layers of each
    storage: Path
    urls: tuple[str, ...] = ()
    python: str | None = None
    options: tuple[str, ...] = ()  # words of the command line of a server that is started
    dtype: str = "auto"
    max_model_len: int | None = None

    def config(self, target: str) -> TargetConfig:
        """What the server runs. Raises ConfigError for a target whose states vLLM does not give."""
        directory = resolve(target)
        if (reason := servers.missing_states(directory)) is not None:
            raise ConfigError(f"--engine vllm: {reason}")
        config, dtype = read_target_config(directory), choose_dtype(self.dtype)
        return config if dtype is None else replace(config, dtype=str(dtype).removeprefix("torch."))

    def layers(self, target: str) -> CapturedLayers:
        """All that any of the drafters reads. Raises CheckpointError where one is not for this target."""
        directory, config = resolve(target), self.config(target)
        ids = set[int]()
        for name in self.drafters:
            checkpoint = read_drafter(resolve(name))
            raise_errors(checkpoint, check(checkpoint, config, directory))
            ids |= {*(checkpoint.config.resolved(config).aux_layer_ids or ())}
        return CapturedLayers.of(config, weights_digest(directory), tuple(sorted(ids)))

    def words(self, target: str) -> list[str]:
        """The words after the model of a server's command line."""
        config = self.config(target)
        longest = min(self.max_model_len or config.max_positions, config.max_positions)
        words = ["--dtype", config.dtype, "--max-model-len", str(longest), "--generation-config", "vllm"]
        return [*words, *servers.capture_options(self.layers(target), self.storage), *self.options]

    def command(self, target: str) -> str:
        """What to type where a server of `urls` shall run."""
        return servers.server_command(str(resolve(target)), self.words(target), self.python)


class CapturedSource:
    """A target that vLLM runs. Here are its embedding, its final norm, its head, and the drafter."""

    tells_rounds = False
    drafter: Drafter

    def __init__(
        self, target: str, drafter: str, depth: int, vllm: VllmServers, device: str, say: Callable[[str], None]
    ) -> None:
        self._directory, self._config = resolve(target), vllm.config(target)
        self._device, layers = choose_device(device), vllm.layers(target)
        self.drafting_depth, self.vocab_size = depth, self._config.vocab_size
        self.tokenizer = load_tokenizer(self._directory)
        dtype = DTYPES[layers.dtype]
        self._dtype = torch.float32 if self._device.type == "cpu" else dtype  # 16 bits are slow on a CPU
        ends = load_target(self._directory, dtype=dtype, ends_only=True).requires_grad_(False)
        if absent := [url for url in vllm.urls if not VllmClient(url.rstrip("/")).is_ready()]:
            advice = "start it as --print-vllm-command says"
            raise ConfigError(f"--vllm-url {absent[0]}: no vLLM answers there that is ready; {advice}")
        vllm.storage.mkdir(parents=True, exist_ok=True)
        self._stack, files = ExitStack(), StateFiles(vllm.storage, layers)
        if vllm.urls:
            opened = servers.connect_hosts(vllm.urls)
        else:
            self._stack.callback(files.clean, ())  # what was asked for and not read
            log, words = vllm.storage / "vllm.log", vllm.words(target)
            opened = servers.start_host(str(self._directory), words, python=vllm.python, log_file=log, say=say)
        hosts = self._stack.enter_context(opened)
        try:
            norm = copy.deepcopy(ends.norm)
            self._reader = StateReader(files, lambda ids: hosts.write_states(layers.key, ids), norm=norm)
            self._answers = servers.VllmAnswers(hosts, stop_ids(self._directory), concurrency=CONCURRENCY)
            servers.check_serves(hosts, self._reader, ends.lm_head.weight)
            self._ends = ends.to(device=self._device, dtype=self._dtype)
            self.exchange(drafter)
        except BaseException:
            self._stack.close()
            raise
        self._in_flight = CONCURRENCY * len(hosts.addresses)
        # A text whose states are asked for is a prompt there, and one token follows it.
        self.max_model_len = min(vllm.max_model_len or hosts.max_model_len, hosts.max_model_len - 1)
        self._told: dict[tuple[tuple[int, ...], SamplingParams], RequestOutput] = {}

    def exchange(self, drafter: str) -> None:
        loaded = load_drafter(resolve(drafter), self._config, target_directory=self._directory)
        self.drafter = loaded.to(device=self._device, dtype=self._dtype).requires_grad_(False)
        self.drafter.share_with(self._ends)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Whichever drafter is probed, the answers are the target's: each is asked for once."""
        keys = [(tuple(prompt), params) for prompt, params in zip(prompts, sampling_params, strict=True)]
        new = [key for key in dict.fromkeys(keys) if key not in self._told]
        outputs = self._answers.generate([key[0] for key in new], [key[1] for key in new], progress=progress)
        self._told |= zip(new, outputs, strict=True)
        return [self._told[key] for key in keys]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if self.tokenizer is None:
            raise PromptError("chat messages need a tokenizer, which the target's directory lacks")
        return encode_chat(self.tokenizer, messages)

    def states(self, texts: Iterable[Sequence[int]]) -> Iterator[TargetStates]:
        layers = self._reader.files.layers
        chosen = [layers.aux_layer_ids.index(layer) for layer in self.drafter.aux_layer_ids]
        for numbers in self._reader.ahead(texts, max_bytes=MAX_BYTES, in_flight=self._in_flight):
            parts = numbers.to(device=self._device, dtype=self._dtype).view(len(numbers), -1, layers.hidden_size)
            yield TargetStates(final=parts[:, -1], aux=parts[:, chosen].flatten(1) if chosen else None)

    def close(self) -> None:
        """End the server, if it was started here."""
        self._stack.close()
