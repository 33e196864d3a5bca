"""The recipe of a training run: what a YAML file may say, with its defaults, checked before anything runs.

Sections are frozen dataclasses. `Recipe.load` reads a file, applies `section.key=value` overrides, and refuses unknown
names and impossible values in one line that says where.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import yaml

from fledge.errors import ConfigError
from fledge.files import read_yaml
from fledge.records import Record, decode


@dataclass(frozen=True, kw_only=True)
class TargetSection:
    """The model the drafter is for."""

    path: str  # directory or hub name
    backend: Literal["auto", "fledge", "transformers"] = "auto"  # auto: our own where the family is ours
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # auto: as stored
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """What the drafter learns from. Each source is a JSONL file (.xz and .gz too): chat, ShareGPT or plain text."""

    sources: tuple[str, ...]
    max_examples: int | None = None
    max_length: int = 2048  # tokens; longer conversations are cut, or dropped where no answer would be left
    min_answer_tokens: int = 1
    loss_on: Literal["answers", "all"] = "answers"  # all: prompts teach too; the target tells what it would have said
    held_out: int = 64  # prompts kept for `eval` when it names no files of its own
    templates: tuple[str, ...] = ()  # further chat templates (Jinja files) for augmentation, besides the target's own
    template_share: float = 0.0  # of the conversations, rendered with one of `templates`
    drop_system_share: float = 0.0  # of the conversations with a system prompt, rendered without it
    system_prompts: tuple[str, ...] = ()  # others to put in their place
    vary_system_share: float = 0.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class RegenerateSection:
    """The target's own answers, which drafters learn best from."""

    enabled: bool = True
    engine: Literal["fledge", "vllm"] = "fledge"
    turns: Literal["last", "all"] = "last"
    temperature: float = 0.0
    temperatures: tuple[float, ...] = ()  # in its place: one of them for each answer, as its seed has it
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 512
    keep_cut: bool = True  # answers that reached max_tokens; false: they are left out, as most of them loop
    samples: int = 1  # answers to each prompt, with different seeds
    max_minutes: float | None = None  # of one start: what is not answered by then is left out
    max_num_seqs: int = 256  # answered together
    chunk: int = 512  # prompts written to disk together; an interrupted run repeats at most one chunk
    # That answer side by side on one device; several for targets so small that the host is the limit.
    processes: int = 1
    gpu_memory_utilization: float = 0.88  # of the device, for all of them (not for vLLM); less leaves room for others
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class VocabSection:
    """The draft vocabulary: the tokens that the training answers use most."""

    size: int | None = None  # None: the target's whole vocabulary
    count_prompts: bool = False  # count the tokens of prompts too, not only those of answers


@dataclass(frozen=True, kw_only=True)
class CaptureSection:
    """Where the target's hidden states come from during training."""

    mode: Literal["online", "offline"] = "online"
    engine: Literal["fledge", "vllm"] = "fledge"
    batch_tokens: int = 16384  # offline: tokens in one pass of the target, of Fledge's own
    shard_tokens: int = 1_000_000  # offline: tokens in one file


@dataclass(frozen=True, kw_only=True)
class VllmSection:
    """The vLLM that answers and captures, where `regenerate.engine` or `capture.engine` says so."""

    urls: tuple[str, ...] = ()  # of servers that run already; empty: one is started here, and ended
    storage: str | None = None  # directory that they write states to and training reads from; None: in `output`
    storage_gb: float = 50.0  # of states that are written and not yet read, at most
    concurrency: int = 64  # requests at once, at each server
    python: str | None = None  # that has vLLM; None: FLEDGE_VLLM_PYTHON, or the one that runs Fledge
    options: str = ""  # of the server that is started, as on its command line
    devices: str | None = None  # CUDA_VISIBLE_DEVICES of that server; None: all

    @property
    def max_bytes(self) -> int:
        return round(self.storage_gb * 1e9)


@dataclass(frozen=True, kw_only=True)
class DrafterSection:
    """The drafter's shape; what is None follows the target."""

    variant: Literal["eagle1", "eagle3", "eagle3.1"] = "eagle3.1"
    fc_norm: bool | None = None  # overrides the variant, for ablations
    norm_output: bool | None = None
    norm_before_residual: bool = False
    num_layers: int = 1
    attention: Literal["gqa", "mla"] = "gqa"  # mla: latent, of the shape that the target's has (DeepSeek, Kimi)
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int | None = None
    sliding_window: int | None = None  # of every layer's attention, in tokens; None: full attention
    aux_layer_ids: tuple[int, ...] | None = None  # ids of layer inputs, as vLLM counts them
    train_embedding: bool = False  # the drafter gets an embedding of its own, started from the target's
    head_from_target: bool = True  # its head starts from the target's rows
    init_from: str | None = None  # a drafter checkpoint to go on from


@dataclass(frozen=True, kw_only=True)
class FitSection:
    """The optimisation."""

    depth: int = 7  # draft steps unrolled (training-time test)
    depth_decay: float = 0.8  # weight of depth k is decay ** k
    loss: Literal["soft_ce", "kl", "lk"] = "soft_ce"
    kl_weight: float = 0.0  # with lk: this much forward KL is added
    feature_weight: float = 0.1  # eagle1: of the smooth-L1 loss between its state and the target's
    length: int = 2048  # tokens in a packed row
    rows: int = 8  # packed rows in one optimizer step, over all processes and micro-batches
    micro_rows: int | None = None  # rows in one pass; None: all that this process has
    epochs: float = 2.0
    max_steps: int | None = None  # overrides epochs
    max_minutes: float | None = None  # of steps, the first not counted: the schedule ends by then, if not before
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the layers' matrices; head, embedding, norms keep AdamW
    lr: float = 1e-4
    min_lr_ratio: float = 0.0
    warmup: float = 0.03  # share of all steps
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU
    activation_checkpointing: bool = False
    compile: Literal["auto", "on", "off"] = "auto"  # auto: on a GPU
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    log_every: int = 10
    drift_every: int = 100  # steps between drift signals (attention mass, hidden norms)
    save_every: int = 500  # steps between checkpoints to resume from
    candidates: int = 3  # last checkpoints kept for `eval` to choose from
    max_bad_steps: int = 20  # non-finite steps in a row before giving up
    tensorboard: bool = False
    wandb_project: str | None = None
    seed: int = 0

    def total_steps(self, rows: int) -> int:
        """Optimizer steps of a run over `rows` packed rows."""
        return self.max_steps or max(1, round(self.epochs * rows / self.rows))


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Acceptance length through the engine."""

    enabled: bool = True
    sources: tuple[str, ...] = ()  # JSONL files with `messages`; empty: the held-out prompts of `data`
    max_prompts: int = 64  # of each source
    max_tokens: int = 128
    depths: tuple[int, ...] = ()  # empty: the trained depth and twice that (at most 16)
    temperature: float = 0.0
    max_num_seqs: int = 32
    candidate_prompts: int = 32  # prompts used to choose between checkpoints


@dataclass(frozen=True, kw_only=True)
class Recipe(Record):
    """A whole run. `output` is the run's directory; everything is written below it."""

    output: str
    target: TargetSection
    data: DataSection
    regenerate: RegenerateSection = field(default_factory=RegenerateSection)
    vocab: VocabSection = field(default_factory=VocabSection)
    capture: CaptureSection = field(default_factory=CaptureSection)
    vllm: VllmSection = field(default_factory=VllmSection)
    drafter: DrafterSection = field(default_factory=DrafterSection)
    fit: FitSection = field(default_factory=FitSection)
    eval: EvalSection = field(default_factory=EvalSection)
    device: str = "auto"
    name: str | None = None  # of the drafter, in its model card

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> "Recipe":
        """Read a YAML file, or the recipe of the package that has this name.

        Paths in a file are relative to it; those of a named recipe and in overrides to the working directory.
        """
        return cls.of(read_yaml(path, recipe_text(path)), path, overrides)

    @classmethod
    def of(cls, values: Mapping[str, Any], path: Path, overrides: Sequence[str] = ()) -> "Recipe":
        """Make a recipe of what a file, or a part of one, says."""
        anchored: dict[str, Any] = _anchored(values, path.parent)  # of a bare name: the working directory
        for override in overrides:
            _apply_override(anchored, override)
        recipe = decode(cls, anchored, str(path))
        for key, holds, allowed in recipe._checks():
            if not holds:
                raise ConfigError(f"{path}: {key}: found {attrgetter(key)(recipe)!r}, allowed is {allowed}")
        return recipe

    def _checks(self) -> Iterator[tuple[str, bool, str]]:
        """Yield keys whose values must be meant in some way, whether they are, and what is allowed."""
        for section, values in asdict(self).items():
            for name, value in values.items() if isinstance(values, dict) else ():
                if type(value) in (int, float):
                    key = f"{section}.{name}"
                    yield key, math.isfinite(value), "a finite number"
                    if name in _SHARES:
                        yield key, 0.0 <= value <= 1.0, "0 to 1"
                    elif name in _SHARES_OF_SOMETHING:
                        yield key, 0.0 < value <= 1.0, "above 0, up to 1"
                    elif name in _MAY_BE_ZERO:
                        yield key, value >= 0, "0 or more"
                    else:
                        yield key, value > 0, "a positive number"
        data, fit = self.data, self.fit
        yield "fit.depth", fit.depth <= 16, "1 to 16"
        yield "eval.depths", all(1 <= d <= 16 for d in self.eval.depths), "numbers from 1 to 16"
        temperatures = self.regenerate.temperatures
        yield "regenerate.temperatures", all(0 <= t < math.inf for t in temperatures), "numbers from 0"
        yield "fit.betas", all(0 <= beta < 1 for beta in fit.betas), "numbers from 0 to below 1"
        window = self.drafter.sliding_window
        yield "drafter.sliding_window", window is None or window > fit.depth, f"more than fit.depth ({fit.depth})"
        yield "device", re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None, "auto, cpu or cuda"
        yield "data.sources", bool(data.sources), "at least one file"
        yield "fit.optimizer", fit.optimizer == "adamw" or fit.parallel == "ddp", "adamw with fit.parallel fsdp2"
        yield "fit.micro_rows", fit.rows % (fit.micro_rows or 1) == 0, f"a divisor of {fit.rows}"
        yield "vllm.storage", not self.vllm.urls or bool(self.vllm.storage), "the directory that vllm.urls write to"
        processes = self.regenerate.processes
        yield "regenerate.processes", processes == 1 or self.regenerate.engine == "fledge", "1 with engine vllm"
        for share, names in (("template_share", "templates"), ("vary_system_share", "system_prompts")):
            holds = getattr(data, share) == 0 or bool(getattr(data, names))
            yield f"data.{share}", holds, f"0 unless data.{names} names some"

    @property
    def uses_vllm(self) -> bool:
        return self.capture.engine == "vllm" or (self.regenerate.enabled and self.regenerate.engine == "vllm")

    @property
    def eval_depths(self) -> tuple[int, ...]:
        """Depths that `eval` measures: the trained one and beyond it."""
        return self.eval.depths or tuple(dict.fromkeys((self.fit.depth, min(2 * self.fit.depth, 16))))


def recipe_text(path: Path) -> str:
    """The text of a recipe: a file, or the name of one that comes with the package."""
    shipped = {file.stem: file for file in Path(__file__).with_name("recipes").glob("*.yaml")}
    named = path.name == str(path) and not path.is_file()
    try:
        return (shipped.get(path.name, path) if named else path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    except OSError as error:
        known = f"; recipes by name: {', '.join(sorted(shipped))}" if named else ""
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{known}") from None


# All other numbers must be above zero.
_SHARES = {
    "template_share",
    "drop_system_share",
    "vary_system_share",
    "min_lr_ratio",
    "warmup",
}
_SHARES_OF_SOMETHING = {"top_p", "gpu_memory_utilization"}
_MAY_BE_ZERO = {"held_out", "temperature", "top_k", "kl_weight", "feature_weight", "weight_decay", "seed"}


_PATHS = ("output", "data.sources", "data.templates", "eval.sources", "vllm.storage")
_PATHS_OR_NAMES = ("target.path", "drafter.init_from", "vllm.python")  # what is no directory may be a model's name


def _apply_override(values: dict[str, Any], override: str) -> None:
    """`section.key=value`, the value read as YAML; of a whole section, only the keys that it names."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{override}': expected key=value, for example fit.lr=2e-4")
    try:
        value = _anchored(yaml.safe_load(text), Path.cwd(), key)
    except yaml.YAMLError:
        raise ConfigError(f"override '{override}': '{text}' is not valid YAML") from None
    *sections, name = key.split(".")
    for section in sections:
        values[section] = values.get(section) or {}
        values = values[section]
        if not isinstance(values, dict):
            raise ConfigError(f"override '{override}': '{section}' is not a section")
    below = values.get(name)
    values[name] = below | value if isinstance(below, dict) and isinstance(value, dict) else value


def _anchored(value: Any, base: Path, key: str = "") -> Any:
    """Make the relative paths among raw values absolute; whatever is not text is left to the checks."""

    def anchored(text: str, key: str) -> str:
        is_path = key in _PATHS or (key in _PATHS_OR_NAMES and (base / text).exists())
        return str((base / text).absolute()) if is_path else text

    return map_texts(value, anchored, key)


def map_texts(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Raw values with `change(text, its key)` in place of every text."""
    if isinstance(value, dict):
        return {name: map_texts(item, change, f"{key}.{name}".lstrip(".")) for name, item in value.items()}
    if isinstance(value, list):
        return [map_texts(item, change, key) for item in value]
    return change(value, key) if isinstance(value, str) else value
