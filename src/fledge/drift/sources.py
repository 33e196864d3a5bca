"""Where the probe gets the target's answers and hidden states: from our engine, or from vLLM.

    EngineSource    our engine generates the text; one more pass of the target gives the states
    VllmSource      vLLM generates the text; its connector writes the states

Neither uses the drafter to generate. What a round drafts depends only on the verified text before it, and the text is
what the target chose, so the rounds that speculation would have taken are known without running it. `VllmSource` never
loads the target: it reads only the embedding, final norm and head of its checkpoint.
"""

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from fledge.checkpoints.contract import check
from fledge.checkpoints.drafter import load_drafter, raise_errors
from fledge.checkpoints.reading import read_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target, read_target_config, stop_ids, weights_digest
from fledge.decoding.params import SamplingParams
from fledge.devices import DTYPES, choose_device, choose_dtype
from fledge.drift.answers import Answer
from fledge.drift.replay import target_states
from fledge.engine.config import MAX_DEPTH
from fledge.engine.llm import LLM
from fledge.engine.outputs import RequestOutput
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.errors import ConfigError, PromptError
from fledge.models.config import TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetStates
from fledge.native import accelerate_drafter
from fledge.vllm_process.client import VllmClient
from fledge.vllm_states import hosts as servers
from fledge.vllm_states.files import CapturedLayers, StateFiles, StateReader

CONCURRENCY = 32  # requests at once, at each vLLM
MAX_BYTES = 4 << 30  # of states that vLLM has written and that are not yet read
MAX_ROWS, MAX_ROWS_ON_CPU = 1 << 15, 1 << 11  # tokens of several texts in one pass
KEPT_BYTES = 2 << 30  # of states that are cached for other drafters


_T = TypeVar("_T")
_Text = tuple[tuple[int, ...], tuple[int, ...]]  # aux layers, and tokens
ProgressCallback = Callable[[int, int], None]  # prompts answered, and prompts in all


class Source(Protocol):
    """Gives a `Prober` the target's answers and states, and a drafter that can be exchanged."""

    tokenizer: Any | None
    max_model_len: int
    vocab_size: int

    @property
    def drafter(self) -> Drafter: ...

    @property
    def drafting_depth(self) -> int:
        """Depth of the rounds that are derived from the text."""
        ...

    def set_drafter(self, drafter: str) -> None: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        progress: ProgressCallback | None = None,
    ) -> list[RequestOutput]: ...

    def answers(
        self, prompts: Sequence[Sequence[int]], sampling_params: Sequence[SamplingParams], progress: ProgressCallback
    ) -> list[Answer]:
        """The answers that `generate` gives, and the tokens that would have followed, if the source knows them."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...

    def states(self, texts: Iterable[Sequence[int]]) -> Iterator[TargetStates]:
        """The states of each text that the drafter reads, [tokens, ...] each, in this order."""
        ...

    def close(self) -> None: ...


class EngineSource:
    """A target in our engine, which stays loaded while drafters are exchanged."""

    drafter: Drafter

    def __init__(self, target: str, drafter: str, depth: int, options: Mapping[str, Any]) -> None:
        self.drafting_depth = min(depth, MAX_DEPTH)
        self._directory = resolve(target)
        # The replay needs memory of its own, beside the engine's cache.
        self.llm = LLM(target, **{"gpu_memory_utilization": 0.6, **options})
        self.tokenizer, self.max_model_len = self.llm.tokenizer, self.llm.max_model_len
        self.vocab_size = self.llm.target.config.vocab_size
        self._kept: dict[_Text, TargetStates] = {}
        self.set_drafter(drafter)

    def set_drafter(self, drafter: str) -> None:
        target = self.llm.target
        self.drafter = load_drafter(resolve(drafter), target, target_directory=self._directory).requires_grad_(False)
        if self.llm.config.pack_weights:
            accelerate_drafter(self.drafter)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        progress: ProgressCallback | None = None,
    ) -> list[RequestOutput]:
        return self.llm.generate(prompts, sampling_params, progress=progress)

    def answers(
        self, prompts: Sequence[Sequence[int]], sampling_params: Sequence[SamplingParams], progress: ProgressCallback
    ) -> list[Answer]:
        ends, several = set(self.llm.eos_ids), list[Answer]()
        longer = [
            replace(params, max_tokens=(params.max_tokens or 0) + self.drafting_depth, ignore_eos=True)
            for params in sampling_params
        ]
        for output, params in zip(self.generate(prompts, longer, progress=progress), sampling_params, strict=True):
            said = tuple(output.outputs[0].token_ids)
            end = next((i for i, token in enumerate(said, start=1) if token in ends), len(said))
            end = min(end, params.max_tokens or end)
            several.append(Answer(said[:end], said[end : end + self.drafting_depth]))
        return several

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.llm.encode_chat(messages)

    def states(self, texts: Iterable[Sequence[int]]) -> Iterator[TargetStates]:
        """All drafters that read the same layers get the same states, so they are cached while there is room."""
        layers, wanted = self.drafter.aux_layer_ids, [tuple(text) for text in texts]
        for several in in_batches(wanted, len, self.llm.target.embed_tokens.weight.device):
            missing = [text for text in dict.fromkeys(several) if (layers, text) not in self._kept]
            found = dict(zip(missing, target_states(self.llm.target, missing, layers) if missing else (), strict=True))
            for text in several:
                yield found[text] if text in found else self._kept[layers, text]
            self._keep({(layers, text): states for text, states in found.items()}, {(layers, text) for text in wanted})

    def _keep(self, new: Mapping[_Text, TargetStates], wanted: Container[_Text]) -> None:
        """Cache states. To make room, states of texts that are not `wanted` are dropped, the oldest first."""
        room = KEPT_BYTES - sum(map(_bytes, self._kept.values()))
        for key, states in new.items():
            for old in [one for one in self._kept if one not in wanted]:
                if _bytes(states) <= room:
                    break
                room += _bytes(self._kept.pop(old))
            if _bytes(states) <= room:
                room -= _bytes(states)
                self._kept[key] = states

    def close(self) -> None:
        self.llm.close()


def in_batches(items: Iterable[_T], size: Callable[[_T], int], device: torch.device) -> Iterator[list[_T]]:
    """Yield the texts in batches with as many tokens as suit the device.

    A GPU is fast with few launches, a CPU with batches that fit into its caches.
    """
    most = MAX_ROWS_ON_CPU if device.type == "cpu" else MAX_ROWS
    batch, total = list[_T](), 0
    for item in items:
        if batch and total + size(item) > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch


def _bytes(states: TargetStates) -> int:
    return sum(part.nbytes for part in (states.final, states.aux) if part is not None)


@dataclass(frozen=True, kw_only=True)
class VllmServers:
    """The vLLM servers that run the target: at `urls`, or one started here. They write states to `storage`."""

    drafters: tuple[str, ...]  # all that will be probed: the server captures the layers of each
    storage: Path
    urls: tuple[str, ...] = ()
    python: str | None = None
    options: tuple[str, ...] = ()  # command-line arguments of a server that is started here
    dtype: str = "auto"
    max_model_len: int | None = None

    def config(self, target: str) -> TargetConfig:
        """Config of the target in the server's dtype. Raises ConfigError if vLLM cannot give the target's states."""
        directory = resolve(target)
        if (reason := servers.missing_states(directory)) is not None:
            raise ConfigError(f"--engine vllm: {reason}")
        config, dtype = read_target_config(directory), choose_dtype(self.dtype)
        return config if dtype is None else replace(config, dtype=str(dtype).removeprefix("torch."))

    def layers(self, target: str) -> CapturedLayers:
        """The layers that any of the drafters reads. Raises CheckpointError if one is not for this target."""
        directory, config = resolve(target), self.config(target)
        ids = set[int]()
        for name in self.drafters:
            checkpoint = read_drafter(resolve(name))
            raise_errors(checkpoint, check(checkpoint, config, directory))
            ids |= {*(checkpoint.config.resolved(config).aux_layer_ids or ())}
        return CapturedLayers.of(config, weights_digest(directory), tuple(sorted(ids)))

    def words(self, target: str) -> list[str]:
        """The server's command-line arguments after the model."""
        config = self.config(target)
        longest = min(self.max_model_len or config.max_positions, config.max_positions)
        words = ["--dtype", config.dtype, "--max-model-len", str(longest), "--generation-config", "vllm"]
        return [*words, *servers.capture_options(self.layers(target), self.storage), *self.options]

    def command(self, target: str) -> str:
        """The command that starts a server for `urls` on another machine."""
        return servers.server_command(str(resolve(target)), self.words(target), self.python)


class VllmSource:
    """A target that vLLM runs. Only its embedding, final norm and head are loaded here, and the drafter."""

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
            self._stack.callback(files.clean, ())  # removes states that were asked for and not read
            log, words = vllm.storage / "vllm.log", vllm.words(target)
            opened = servers.start_host(str(self._directory), words, python=vllm.python, log_file=log, say=say)
        hosts = self._stack.enter_context(opened)
        try:
            norm = copy.deepcopy(ends.norm)
            self._reader = StateReader(files, lambda ids: hosts.write_states(layers.key, ids), norm=norm)
            self._answers = servers.VllmAnswers(hosts, stop_ids(self._directory), concurrency=CONCURRENCY)
            servers.check_serves(hosts, self._reader, ends.logits_weight)
            self._ends = ends.to(device=self._device, dtype=self._dtype)
            self.set_drafter(drafter)
        except BaseException:
            self._stack.close()
            raise
        self._in_flight = CONCURRENCY * len(hosts.addresses)
        # To get the states of a text, it is sent as a prompt, and vLLM generates one token after it.
        self.max_model_len = min(vllm.max_model_len or hosts.max_model_len, hosts.max_model_len - 1)

    def set_drafter(self, drafter: str) -> None:
        loaded = load_drafter(resolve(drafter), self._config, target_directory=self._directory)
        self.drafter = loaded.to(device=self._device, dtype=self._dtype).requires_grad_(False)
        self.drafter.share_with(self._ends)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        progress: ProgressCallback | None = None,
    ) -> list[RequestOutput]:
        return self._answers.generate(prompts, sampling_params, progress=progress)

    def answers(
        self, prompts: Sequence[Sequence[int]], sampling_params: Sequence[SamplingParams], progress: ProgressCallback
    ) -> list[Answer]:
        outputs = self.generate(prompts, sampling_params, progress=progress)
        return [Answer(tuple(output.outputs[0].token_ids)) for output in outputs]

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
