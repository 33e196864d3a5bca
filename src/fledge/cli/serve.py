"""`fledge serve`: an OpenAI-compatible server. Takes the command line of `vllm serve`."""

import json
import os
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from fledge.checkpoints.source import DRAFTERS, TARGET, resolve
from fledge.cli.command import options, settings_of
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.engine.vllm_options import ALIASES, FOREIGN, note_on
from fledge.errors import ConfigError, nearest_name_hint
from fledge.files import parse_json, read_json, read_yaml

BUNDLED_DEPTH = 5
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_INTERNAL = {"speculative_config", "block_size", "num_blocks", "cudagraph_capture_sizes", "pack_weights", "read_late"}
ENGINE_OPTIONS = tuple(one.name for one in fields(EngineConfig) if one.name not in _INTERNAL)
_SEVERAL_VALUES = {"--served-model-name", "--api-key"}  # vLLM's way is to list them, ours to repeat the option
_JSON = {"--speculative-config"}  # its keys may be given one by one: --speculative-config.model


@options("serve", *ENGINE_OPTIONS)
def serve(
    model: str | None = None,
    *,
    speculative_config: str | None = None,
    config: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: list[str] | None = None,
    served_model_name: list[str] | None = None,
    chat_template: str | None = None,
    generation_config: str = "auto",
    enable_auto_tool_choice: bool = False,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    structured_outputs_config: str | None = None,
    allow_client_templates: bool = False,
    cors_origin: list[str] | None = None,
    allowed_host: list[str] | None = None,
    root_path: str = "",
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
    max_queue: int = 256,
    max_body_bytes: int = 2 * 2**20,
    request_timeout: float = 600.0,
    drain_timeout: float = 30.0,
    log_format: str = "text",
    threads: int | None = None,
    engine: Mapping[str, Any],
) -> None:
    """Serve a model with OpenAI's API and a page to watch it.

    The page says whether speculation pays, and why not.
    """
    del enable_auto_tool_choice  # vLLM's consent to read tool calls; here a request's `tools` is enough
    del config  # `ServeCommand` has read it
    speculation = _speculation(model, speculative_config)
    keys = [*(api_key or ()), *filter(None, map(os.environ.get, ("FLEDGE_API_KEY", "VLLM_API_KEY")))]
    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format: found '{log_format}', allowed is text or json")
    template = None if chat_template is None else _read_template(chat_template)
    EngineConfig(**engine)  # refuses, before anything is loaded, what no engine could do
    listener, source = _bind(host, port), model or TARGET
    pair = source if speculation is None else f"{source} with {speculation.model}"

    try:
        from fledge.server.app import run  # noqa: PLC0415 - torch takes seconds
        from fledge.server.connections import is_loopback  # noqa: PLC0415
        from fledge.server.engine_process import EngineProcess  # noqa: PLC0415
        from fledge.server.options import ServeOptions  # noqa: PLC0415
        from fledge.server.request_log import set_up_logging  # noqa: PLC0415
        from fledge.server.service import Service  # noqa: PLC0415
    except ModuleNotFoundError as error:
        message = f"the server needs the package '{error.name}': install it with pip install 'fledge[server]'"
        raise ConfigError(message) from None
    set_up_logging(log_format)
    directory = resolve(source)
    names, is_private = allowed_host or [], is_loopback(host) and not keys
    settings = settings_of(
        ServeOptions,
        locals(),
        served_model_names=tuple(served_model_name or (source,)),
        api_keys=tuple(keys),
        chat_template=template,
        chat_template_name=None if chat_template is None else Path(chat_template).stem,
        disable_any_whitespace=_disables_any_whitespace(structured_outputs_config),
        cors_origins=tuple(_origins(cors_origin or [])),
        allowed_hosts=() if "*" in names or not (names or is_private) else ("localhost", *names),
        root_path=root_path.rstrip("/"),
        default_sampling=_sampling_defaults(directory, generation_config),
        seed=engine["seed"],
    )
    drafting = None if speculation is None else asdict(speculation)
    llm = {**engine, "model": str(directory), "speculative_config": drafting}
    print(f"loading {pair}, to be served at port {listener.getsockname()[1]}", file=sys.stderr, flush=True)
    process = EngineProcess(llm, threads=threads, log_format=log_format)
    try:
        process.wait_until_ready()
        service = Service(process, settings)
    except BaseException:
        process.kill()
        raise
    scheme = "http" if ssl_certfile is None else "https"

    def ready(bound: int) -> None:
        shown = f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound}{settings.root_path}"
        info = process.info
        depth = f", {info.max_depth} drafts deep at most" if speculation is not None else ", without a drafter"
        machine = f"{info.device} in {info.dtype}, room for {info.kv_capacity:,} tokens of KV cache"
        names = f"serving {pair}{depth}, at {shown} (page: {shown}/, API: {shown}/v1) as {settings.model_name}"
        print(f"{names}, on {machine}", file=sys.stderr, flush=True)
        if not is_loopback(host) and not keys:
            print("warning: anybody who can reach this address can use the server; see --api-key", file=sys.stderr)

    status = run(service, listener, ssl_keyfile=ssl_keyfile, ssl_certfile=ssl_certfile, on_ready=ready)
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)  # other threads may be in the middle of what nobody waits for


def _speculation(model: str | None, config: str | None) -> SpeculativeConfig | None:
    """Return what to speculate with: what was asked for; the bundled drafter for the bundled target."""
    if config is not None:
        return SpeculativeConfig.from_json(config)
    if model is None:
        return SpeculativeConfig(model=DRAFTERS["EAGLE-3.1"], num_speculative_tokens=BUNDLED_DEPTH)
    return None


def _bind(host: str, port: int) -> socket.socket:
    """Take the address before anything is loaded; whoever calls there is refused until the server listens."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(address)
        except OSError:  # perhaps by connections of a server that is gone; two that both say so could share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host}, port {port}: {reason}; see --host and --port") from None
    return listener


def _disables_any_whitespace(config: str | None) -> bool:
    """Read vLLM's JSON for structured outputs: of its fields, white space is the one that means something here."""
    try:
        values = json.loads(config or "{}")
    except (ValueError, RecursionError):
        values = None
    disabled = values.get("disable_any_whitespace", False) if isinstance(values, dict) else None
    if not isinstance(disabled, bool):
        raise ConfigError('--structured-outputs-config: expected JSON such as {"disable_any_whitespace": true}')
    return disabled


def _origins(given: list[str]) -> list[str]:
    """Each value is an origin, or vLLM's JSON list of them."""
    found: list[str] = []
    for value in given:
        try:
            listed = parse_json(value) if value.startswith("[") else [value]
        except ValueError:
            listed = None
        if not isinstance(listed, list) or not all(isinstance(origin, str) and origin for origin in listed):
            raise ConfigError("--cors-origin: expected an origin such as https://example.org, or a JSON list of them")
        found += listed
    return found


def _read_template(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--chat-template: {file} cannot be read: {reason}") from None


def _sampling_defaults(directory: Path, source: str) -> dict[str, float | int]:
    """Return the model's own sampling settings, which a request may overrule, as `vllm serve` does."""
    if source not in ("auto", "vllm"):
        raise ConfigError(f"--generation-config: found '{source}', allowed is auto or vllm")
    values = {} if source == "vllm" else read_json(directory / "generation_config.json") or {}
    return {name: values[name] for name in _SAMPLING_DEFAULTS if isinstance(values.get(name), int | float)}


# The command line of `vllm serve`: which options are harmless, and who handles the others


class ServeCommand(TyperCommand):
    """Reads vLLM's options too: those that do no harm are noted, others refused in words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer brings its own click, or uses the other
        options: list[Any] = [parameter for parameter in self.params if parameter.param_type_name == "option"]
        names = [(option.is_flag, name) for option in options for name in (*option.opts, *option.secondary_opts)]
        flags = {name for is_flag, name in names if is_flag} | {"--help"}
        values = {name for is_flag, name in names if not is_flag}
        ours, notes = translate(args, values, flags)
        files = [ours[i + 1] for i, word in enumerate(ours[:-1]) if word == "--config"]
        if len(files) > 1:
            raise ConfigError("--config: one file can be given")
        settings = {_spelled(f"--{key}"): value for file in files for key, value in read_yaml(Path(file)).items()}
        model = settings.pop("--model", None)
        if settings:
            ours, notes = translate([*_as_words(settings, ours, flags), *args], values, flags)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        rest = super().parse_args(ctx, ours)
        if model is not None and ctx.params["model"] is None:
            ctx.params["model"] = str(model)
        return rest


def _as_words(settings: Mapping[str, Any], given: Sequence[str], flags: Collection[str]) -> list[str]:
    """Options of a file as they are written on a command line, but for those that were given there."""
    words: list[str] = []
    for name, value in settings.items():
        if value is None or (name in given and name not in _JSON):
            continue
        if isinstance(value, bool):
            off = f"--no-{name[2:]}"
            words += [name] if value else [off] if off in flags else []
            continue
        for one in value if isinstance(value, list) else [value]:
            words.append(f"{name}={one if isinstance(one, str) else json.dumps(one)}")
    return words


def _spelled(name: str) -> str:
    """The name of an option as it is listed: vLLM writes `_` for `-`, and has short ones."""
    name = name.replace("_", "-") if name.startswith("--") else name
    return ALIASES.get(name, name)


def _set(values: dict[str, Any], path: str, text: str) -> None:
    """`a.b` = text, which may be JSON; `a.b+` adds to a list."""
    *above, key = path.split(".")
    for one in above:
        values = values.setdefault(one, {})
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if key.endswith("+"):
        values.setdefault(key[:-1], []).append(value)
    else:
        values[key] = value


def translate(
    arguments: Sequence[str], own_values: Collection[str], own_flags: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the arguments that are ours, and notes on those that are vLLM's and do no harm.

    `own_values` and `own_flags` are our options with and without a value. Raises ConfigError for an option that needs
    another engine, and for one that nobody has.
    """
    ours: list[str] = []
    notes: list[str] = []
    dotted: dict[str, list[tuple[str, str]]] = {}
    rest = list(arguments)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            ours.append(word)
            continue
        name, equals, value = word.partition("=")
        name, dot, path = name.partition(".")
        name = _spelled(name)
        foreign = FOREIGN.get(name)
        is_flag = name in own_flags or word in ("-O0", "-O1", "-O2", "-O3") or (foreign or {}).get("flag", False)
        if not equals and not is_flag and rest:
            equals, value = "=", rest.pop(0)
        if dot and name in _JSON & set(own_values) and equals:
            dotted.setdefault(name, []).append((path, value))
        elif dot and foreign is None:
            raise ConfigError(f"unknown option '{name}.{path}'. See fledge serve --help.")
        elif name in own_flags:
            ours.append(name + equals + value)
        elif name in own_values:
            ours += [name, value] if equals else [name]
            while name in _SEVERAL_VALUES and rest and not rest[0].startswith("-"):
                ours += [name, rest.pop(0)]
        elif foreign is not None:
            value = "" if is_flag else value
            note = note_on(name, value, f"{name} {value}".strip())
            notes += [] if note is None else [f"{name}: {note}"]
        else:
            hint = nearest_name_hint(name, [*own_values, *own_flags, *FOREIGN])
            raise ConfigError(f"unknown option '{name}'.{hint if 'Did you' in hint else ' See fledge serve --help.'}")
    for name, keys in dotted.items():
        whole = next((ours[i + 1] for i in range(len(ours) - 2, -1, -1) if ours[i] == name), "{}")
        try:
            values = json.loads(whole)
            for path, value in keys:
                _set(values, path, value)
        except (ValueError, TypeError, AttributeError):
            raise ConfigError(f"{name}.{path}: what is above it is no JSON object") from None
        ours += [name, json.dumps(values)]
    return [*ours, *rest], notes
