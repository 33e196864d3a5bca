"""Options of `vllm serve` that `fledge serve` does not have: which are harmless, and who handles the others."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fledge.errors import ConfigError, nearest_name_hint

_VLLM = "which is vLLM's job: run this pair with 'vllm serve', which loads the same checkpoints"
_SEVERAL_GPUS = f"several GPUs or machines are needed for that, {_VLLM}"


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """An option of vLLM's. `accepted` values mean nothing special; any other value is refused for `reason`."""

    reason: str = ""  # why it is refused; empty: it never is
    accepted: tuple[str, ...] = ()
    is_flag: bool = False
    note: str = ""  # said when it is accepted


def _parallel(*accepted: str) -> Foreign:
    return Foreign(reason=_SEVERAL_GPUS, accepted=accepted or ("1",))


def _value(note: str) -> Foreign:
    return Foreign(note=note)


def _flag(note: str) -> Foreign:
    return Foreign(is_flag=True, note=note)


def _refused(reason: str, *accepted: str) -> Foreign:
    return Foreign(reason=reason, accepted=accepted)


FOREIGN: Mapping[str, Foreign] = {
    "--tensor-parallel-size": _parallel(),
    "--pipeline-parallel-size": _parallel(),
    "--data-parallel-size": _parallel(),
    "--data-parallel-size-local": _parallel(),
    "--decode-context-parallel-size": _parallel(),
    "--prefill-context-parallel-size": _parallel(),
    "--nnodes": _parallel(),
    "--node-rank": _parallel("0"),
    "--api-server-count": _parallel(),
    "--distributed-executor-backend": _parallel("uni"),
    "--data-parallel-backend": _parallel("mp"),
    "--enable-expert-parallel": Foreign(reason=f"experts on several GPUs, {_VLLM}", is_flag=True),
    "--kv-transfer-config": _refused(f"disaggregated serving, {_VLLM}"),
    "--headless": Foreign(reason=_SEVERAL_GPUS, is_flag=True),
    "--quantization": _refused(f"quantised weights, {_VLLM}", "None", "none"),
    "--cpu-offload-gb": _refused(f"weights in the host's memory, {_VLLM}", "0", "0.0"),
    "--swap-space": _value("there is no swap space: a preempted request is read again"),
    "--enable-lora": Foreign(reason=f"adapters, {_VLLM}", is_flag=True),
    "--lora-modules": _refused(f"adapters, {_VLLM}"),
    "--runner": _refused(f"anything but text generation, {_VLLM}", "auto", "generate"),
    "--task": _refused(f"anything but text generation, {_VLLM}", "auto", "generate"),
    "--tokenizer": _refused("the tokenizer comes from the model's directory; put the wanted one there"),
    "--revision": _refused("a hub model is served as it is; download the wanted revision and name its directory"),
    "--hf-overrides": _refused("change the model's config.json instead"),
    "--config": _refused("give the options on the command line"),
    "--load-format": _refused(
        f"weights are read from safetensors or .bin files; for others, {_VLLM}", "auto", "safetensors"
    ),
    "--tokenizer-mode": _refused(
        f"only fast tokenizers (tokenizer.json) are supported; for others, {_VLLM}", "auto", "hf"
    ),
    "--trust-remote-code": _flag("code from model directories is never run here"),
    "--attention-backend": _value("there is one, and it is fledge's own"),
    "--language-model-only": _flag("there is nothing but language models here"),
    "--limit-mm-per-prompt": _value("this server reads text only"),
    "--mm-encoder-tp-mode": _value("this server reads text only"),
    "--disable-log-requests": _flag("requests are logged without their content, one line each"),
    "--no-enable-log-requests": _flag("requests are logged without their content, one line each"),
    "--enable-log-requests": _flag("requests are logged without their content, one line each"),
    "--disable-log-stats": _flag("figures are at /metrics, not in the log"),
    "--disable-uvicorn-access-log": _flag("there is one log line for each request"),
    "--uvicorn-log-level": _value("see --log-format"),
    "--enable-chunked-prefill": _flag("prompts are always read in chunks"),
    "--async-scheduling": _flag("scheduling is always asynchronous on a GPU"),
    "--no-async-scheduling": _flag("scheduling is always asynchronous on a GPU"),
    "--block-size": _value("the engine chooses its own"),
    "--compilation-config": _value("the engine captures its own graphs"),
    "--optimization-level": _value("the engine captures its own graphs"),
    "--download-dir": _value("HF_HOME says where hub models are kept"),
    "--max-seq-len-to-capture": _value("graphs are captured for every length"),
    "--structured-outputs-config": _value("structured output is always on, through llguidance"),
    "--guided-decoding-backend": _value("structured output is always on, through llguidance"),
    "--max-log-len": _value("prompts are never logged"),
    "--response-role": _refused("the role of answers is always 'assistant'", "assistant"),
    "--disable-frontend-multiprocessing": _flag("the engine is always a process of its own"),
    "--scheduling-policy": _refused("requests are served in order of arrival", "fcfs"),
    "--enable-reasoning": _flag("see --reasoning-parser"),
}
ALIASES: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-q": "--quantization",
    "-O": "--optimization-level",
    "-O0": "--optimization-level",
    "-O1": "--optimization-level",
    "-O2": "--optimization-level",
    "-O3": "--optimization-level",
    "-sc": "--speculative-config",
    "--allowed-origins": "--cors-origin",
    "--cors-origins": "--cors-origin",
}


def translate(
    arguments: Sequence[str], own_values: Collection[str], own_flags: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the arguments that are ours, and notes on those that are vLLM's and do no harm.

    `own_values` and `own_flags` are our options with and without a value. Raises ConfigError for an option that needs
    another engine, and for one that nobody has.
    """
    ours: list[str] = []
    notes: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*ours, word, *rest], notes
        if not word.startswith("-") or word == "-":
            ours.append(word)
            continue
        name, equals, value = word.partition("=")
        name = ALIASES.get(name, name)
        if name.startswith("--"):
            name = ALIASES.get(name.replace("_", "-"), name.replace("_", "-"))
        if name in own_flags:
            ours.append(name + equals + value)
        elif name in own_values:
            ours += [name, value] if equals else [name, *rest[:1]]
            rest = rest if equals else rest[1:]
        elif name in FOREIGN:
            foreign = FOREIGN[name]
            if foreign.is_flag or word in ("-O0", "-O1", "-O2", "-O3"):
                value = ""
            elif not equals:
                value = rest.pop(0) if rest else ""
            notes += _judge(name, foreign, value)
        else:
            known = [*own_values, *own_flags, *FOREIGN]
            raise ConfigError(f"unknown option '{name}'.{_hint(name, known)}")
    return ours, notes


def _judge(name: str, foreign: Foreign, value: str) -> list[str]:
    if foreign.reason and value not in foreign.accepted:
        said = f"{name} {value}".strip()
        raise ConfigError(f"{said}: {foreign.reason}")
    return [f"{name}: {foreign.note}"] if foreign.note else []


def _hint(name: str, known: Collection[str]) -> str:
    hint = nearest_name_hint(name, known)
    return hint if "Did you mean" in hint else " See fledge serve --help."
