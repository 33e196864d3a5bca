"""All settings of an engine. The Python API, the command line and the docs are derived from this file.

`SpeculativeConfig` is vLLM's `--speculative-config`, `EngineConfig` has all other settings, with vLLM's names where
vLLM has the same. Does not import torch, so that `--help` is fast.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fledge.errors import ConfigError, NeedsVllmError, refuses_unknown_names
from fledge.files import parse_json, read_json

MAX_DEPTH = 16
DEFAULT_DEPTH = 3
DEFAULT_TREE_BUDGET = 60
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3")  # synonyms
DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = (*DTYPES, *FP8_CACHE_DTYPES)

_ANOTHER_ENGINE = "more is vLLM's job"


@refuses_unknown_names("speculative_config key")
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Which drafter to use, and how. vLLM's keys; `adaptive`, "auto", `tree_width` and `tree_budget` are ours."""

    model: str
    method: str | None = None  # "eagle", "eagle3"; None: by the checkpoint
    num_speculative_tokens: int = DEFAULT_DEPTH  # the maximum, if adaptive
    adaptive: bool = True  # choose the depth, or no drafts, by measured speed; False: always draft this deep
    draft_sample_method: str = "auto"  # "greedy", "probabilistic"; auto: the faster one if adaptive, else "greedy"
    rejection_sample_method: str = "standard"  # for sampled drafts; "block" accepts at least as many
    max_model_len: int | None = None  # no drafts beyond this position
    num_speculative_tokens_per_batch_size: Sequence[Sequence[int]] | None = None  # [[first, last, depth], ...]
    draft_tensor_parallel_size: int | None = None
    quantization: str | None = None
    tree_width: int | None = None  # draft EAGLE-2 trees, with so many nodes expanded at each level
    tree_budget: int = DEFAULT_TREE_BUDGET  # nodes to verify

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("speculative_config: 'model' must name the drafter's directory or hub name")
        _one_of("method", self.method, (None, "eagle", "eagle3"))
        _one_of("draft_sample_method", self.draft_sample_method, ("auto", "greedy", "probabilistic"))
        _one_of("rejection_sample_method", self.rejection_sample_method, ("standard", "block"), _ANOTHER_ENGINE)
        _one_of("draft_tensor_parallel_size", self.draft_tensor_parallel_size, (None, 1), _ANOTHER_ENGINE)
        _one_of("quantization", self.quantization, (None,), _ANOTHER_ENGINE)
        _within("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DEPTH)
        _within("max_model_len", self.max_model_len, 1, optional=True)
        _one_of("adaptive", self.adaptive, (True, False))
        _within("tree_width", self.tree_width, 1, 64, optional=True)
        _within("tree_budget", self.tree_budget, 1, 1024)
        if self.tree_width is not None and self.draft_sample_method == "probabilistic":
            raise ConfigError("speculative_config: draft trees are not sampled; use draft_sample_method 'greedy'")
        table = self.num_speculative_tokens_per_batch_size
        if table is not None and not isinstance(table, Sequence):
            raise ConfigError(
                f"speculative_config: 'num_speculative_tokens_per_batch_size' is {table!r}, expected a list of rows "
                "[first batch size, last batch size, tokens]"
            )
        for row in table or ():
            if not isinstance(row, Sequence) or len(row) != 3 or not all(type(value) is int for value in row):
                raise ConfigError(
                    f"speculative_config: a row of num_speculative_tokens_per_batch_size is {row!r}, "
                    "expected [first batch size, last batch size, tokens]"
                )
            _within("num_speculative_tokens_per_batch_size", row[2], 0, MAX_DEPTH)

    @classmethod
    def from_dict(cls, values: "Mapping[str, Any] | SpeculativeConfig") -> "SpeculativeConfig":
        if isinstance(values, SpeculativeConfig):
            return values
        if not isinstance(values, Mapping):
            raise ConfigError(f"speculative_config: found {type(values).__name__}, expected an object with vLLM's keys")
        if "model" not in values and set(values) <= {field.name for field in fields(cls)}:
            raise ConfigError("speculative_config: 'model' is missing; it names the drafter's directory or hub name")
        return cls(**{str(key): value for key, value in values.items()})

    @classmethod
    def from_json(cls, text: str) -> "SpeculativeConfig":
        try:
            values = parse_json(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"speculative_config: not valid JSON: {error}") from None
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that differ from the defaults, and the depth."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return {**values, "num_speculative_tokens": self.num_speculative_tokens}

    @property
    def max_depth(self) -> int:
        """The largest value of `depth_at`."""
        table = self.num_speculative_tokens_per_batch_size or ()
        return max(self.num_speculative_tokens, *(row[2] for row in table), 0)

    @property
    def is_adaptive(self) -> bool:
        """Whether the engine chooses the depth: not if there is a table of depths."""
        return self.adaptive and not self.num_speculative_tokens_per_batch_size

    @property
    def sample_drafts(self) -> bool | None:
        """Whether drafts of sampled requests are sampled too; None: the controller chooses the faster way."""
        if self.draft_sample_method == "auto":
            return None if self.is_adaptive else False
        return self.draft_sample_method == "probabilistic"

    def depth_at(self, batch_size: int) -> int:
        """Return the depth for a batch size; 0: no drafts."""
        for first, last, depth in self.num_speculative_tokens_per_batch_size or ():
            if first <= batch_size <= last:
                return depth
        return self.num_speculative_tokens


def _one_of(key: str, found: object, allowed: tuple[object, ...], otherwise: str = "") -> None:
    if found not in allowed:
        names = " or ".join(repr(value) for value in allowed if value is not None) or "nothing"
        raise (NeedsVllmError if otherwise else ConfigError)(
            f"speculative_config: '{key}' is {found!r}, here it can be {names}"
            + (f"; {otherwise}" if otherwise else "")
        )


def _within(key: str, found: object, low: int, high: int | None = None, *, optional: bool = False) -> None:
    if optional and found is None:
        return
    if type(found) is not int or found < low or (high is not None and found > high):
        span = f"at least {low}" if high is None else f"{low} to {high}"
        raise ConfigError(
            f"speculative_config: '{key}' is {found!r}, allowed is an integer of {span}"
            + ("; to decode without speculation, give no drafter" if found == 0 else "")
        )


def option(default: Any, text: str, *, least: int | None = None) -> Any:
    """A field of `EngineConfig`: its default, its help text, and for integers the smallest value."""
    return field(default=default, metadata={"help": text, "least": least})


@refuses_unknown_names("engine option")
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to load and run a target, with or without a drafter. `None` means: by the model and the device."""

    speculative_config: SpeculativeConfig | None = field(
        default=None, metadata={"help": "vLLM's JSON: drafter, depth, ...", "least": None}
    )
    dtype: str = option(
        "auto",
        "auto (the checkpoint's), float32, float16 or bfloat16; a CPU always computes in float32.",
    )
    quantization: str | None = option(
        None, "Weight format of the target, by vLLM's name; or fp8, to quantise 16-bit weights while loading."
    )
    device: str = option("auto", "auto, cpu or cuda.")
    max_model_len: int | None = option(None, "Context length, prompt and answer together: 4096, 4k, auto.", least=2)
    max_num_seqs: int = option(64, "Largest number of running requests.", least=1)
    max_num_batched_tokens: int = option(8192, "Largest number of prompt tokens in one step.", least=1)
    scheduling_policy: str = option("fcfs", "fcfs (first come, first served), or priority: lower ones first.")
    gpu_memory_utilization: float = option(0.9, "Fraction of the GPU's memory to use.")
    kv_cache_bytes: int | None = option(None, "Size of the KV cache, instead of that fraction; also on a CPU.", least=1)
    kv_cache_dtype: str = option(
        "auto", "auto (the model's dtype), or fp8: half of the memory, with the checkpoint's scales or none."
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV cache of common prefixes of prompts.")
    enforce_eager: bool = option(False, "No CUDA graphs.")
    batch_invariant: bool = option(
        False, "Results do not depend on the batch, on drafts or on chunks of the prompt, to the bit; as on a CPU."
    )
    seed: int = option(0, "Seed for requests without one.")
    block_size: int | None = option(None, "Tokens per block of the KV cache; 64 on a GPU, 16 on a CPU.", least=1)
    num_blocks: int | None = option(None, "Number of blocks of the KV cache, instead of its size.", least=2)
    cudagraph_capture_sizes: Sequence[int] | None = option(None, "Batch sizes to capture as CUDA graphs.")
    pack_weights: bool = option(True, "CPU: keep a second copy of the weights, in a faster layout.")
    read_late: bool | None = option(None, "Read the results of a step after launching the next one; default: on a GPU.")

    def __post_init__(self) -> None:
        if self.speculative_config is not None:  # may be given as a mapping
            object.__setattr__(self, "speculative_config", SpeculativeConfig.from_dict(self.speculative_config))
        if self.quantization in ("none", "None"):
            object.__setattr__(self, "quantization", None)
        names = {"half": "float16", "float": "float32"}  # vLLM's synonyms
        object.__setattr__(self, "dtype", names.get(self.dtype, self.dtype))
        object.__setattr__(self, "max_model_len", None if self.max_model_len == -1 else self.max_model_len)
        for one in fields(self):
            value, least = getattr(self, one.name), one.metadata["least"]
            if least is not None and value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"{one.name}: found {value!r}, allowed is an integer of at least {least}")
        sizes = self.cudagraph_capture_sizes
        if sizes is not None and not (
            isinstance(sizes, Sequence) and all(type(size) is int and size > 0 for size in sizes)
        ):
            raise ConfigError(f"cudagraph_capture_sizes: found {sizes!r}, allowed is a list of batch sizes from 1 on")
        # Whether the device exists is checked by torch.
        if not (isinstance(self.device, str) and re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)):
            raise ConfigError(f"device: found {self.device!r}, allowed is auto, cpu or cuda")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: found {self.dtype!r}, allowed is {', '.join(DTYPES)}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ConfigError(f"scheduling_policy: found {self.scheduling_policy!r}, allowed is fcfs or priority")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization: found {share!r}, allowed is above 0, up to 1")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise NeedsVllmError(
                f"kv_cache_dtype: found {self.kv_cache_dtype!r}, allowed is {', '.join(KV_CACHE_DTYPES)}; any other "
                "KV cache is vLLM's job"
            )
        if self.batch_invariant and self.kv_cache_dtype in FP8_CACHE_DTYPES:
            raise ConfigError("batch_invariant: not with keys and values in FP8")

    @property
    def max_depth(self) -> int:
        """The largest draft depth; 0 without a drafter."""
        return 0 if self.speculative_config is None else self.speculative_config.max_depth

    @property
    def drafter(self) -> str | None:
        """Directory or hub name of the drafter."""
        return None if self.speculative_config is None else self.speculative_config.model

    def with_drafter(self, model: str) -> "EngineConfig":
        """Return the config with another drafter; it must have one."""
        assert self.speculative_config is not None
        return replace(self, speculative_config=replace(self.speculative_config, model=model))

    @property
    def drafts_trees(self) -> bool:
        return self.speculative_config is not None and self.speculative_config.tree_width is not None

    @property
    def sample_drafts(self) -> bool | None:
        """See `SpeculativeConfig.sample_drafts`."""
        return self.speculative_config is not None and self.speculative_config.sample_drafts

    @property
    def verify_blocks(self) -> bool:
        """Whether sampled drafts are accepted by block verification."""
        return self.speculative_config is not None and self.speculative_config.rejection_sample_method == "block"


def sampling_defaults(directory: Path) -> dict[str, float | int]:
    """Return a model's default sampling settings (generation_config.json)."""
    values = read_json(directory / "generation_config.json") or {}
    return {name: values[name] for name in SAMPLING_DEFAULTS if isinstance(values.get(name), int | float)}
