"""`fledge serve`: an OpenAI-compatible server. Takes the command line of `vllm serve`."""

import errno
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.checkpoints.source import DRAFTERS, TARGET, resolve
from fledge.cli.command import check_choice, from_options, options, parse_json_object
from fledge.cli.serve_vllm import BUNDLED_DEPTH, VllmOptions, open_vllm_proxy, vllm_words
from fledge.cli.vllm_command import vllm_values
from fledge.decoding.params import MAX_LOGPROBS, SamplingParams
from fledge.engine.config import SAMPLING_DEFAULTS, EngineConfig, SpeculativeConfig, sampling_defaults
from fledge.errors import ConfigError, NeedsVllmError, nearest_name_hint
from fledge.files import parse_json

if TYPE_CHECKING:
    from fledge.server.child import Child
    from fledge.server.options import ServeOptions
    from fledge.server.service import Service

_INTERNAL = {"speculative_config", "block_size", "num_blocks", "cudagraph_capture_sizes", "pack_weights", "read_late"}
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "jiter")
ENGINE_OPTIONS = tuple(one.name for one in fields(EngineConfig) if one.name not in _INTERNAL)


@options("serve", *ENGINE_OPTIONS)
def serve(
    model: str | None = None,
    *,
    speculative_config: str | None = None,
    config: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: str | None = None,
    api_key: list[str] | None = None,
    admin_api_key: list[str] | None = None,
    served_model_name: list[str] | None = None,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    default_chat_template_kwargs: str | None = None,
    generation_config: str = "auto",
    override_generation_config: str | None = None,
    max_logprobs: int = MAX_LOGPROBS,
    response_role: str = "assistant",
    return_tokens_as_token_ids: bool = False,
    enable_force_include_usage: bool = False,
    enable_auto_tool_choice: bool = False,
    tool_call_parser: str | None = None,
    exclude_tools_when_tool_choice_none: bool = False,
    reasoning_parser: str | None = None,
    structured_outputs_config: str | None = None,
    allow_client_templates: bool = False,
    cors_origin: list[str] | None = None,
    allowed_host: list[str] | None = None,
    root_path: str = "",
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
    ssl_ca_certs: str | None = None,
    ssl_cert_reqs: int = 0,
    ssl_ciphers: str | None = None,
    disable_fastapi_docs: bool = False,
    max_queue: int = 256,
    max_body_bytes: int = 2 * 2**20,
    request_timeout: float = 600.0,
    drain_timeout: float = 30.0,
    log_format: str = "text",
    threads: int | None = None,
    backend: str = "fledge",
    vllm_python: str | None = None,
    vllm_log: Path | None = None,
    vllm_start_timeout: float = 1800.0,
    vllm_option: list[str] | None = None,
    engine: Mapping[str, Any],
) -> None:
    """Serve a model with OpenAI's API and a dashboard.

    The dashboard shows whether speculation pays, and why not.
    """
    del enable_auto_tool_choice  # needed by vLLM; here tool calls are always parsed
    del config  # read by `ServeCommand`
    check_choice("engine", backend, ("fledge", "vllm", "auto"))
    speculation = None if backend == "vllm" else _speculation(model, speculative_config)
    keys = [*(api_key or ()), *filter(None, map(os.environ.get, ("FLEDGE_API_KEY", "VLLM_API_KEY")))]
    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format: found '{log_format}', allowed is text or json")
    template = None if chat_template is None else _read_template(chat_template)
    EngineConfig(**engine)  # raises ConfigError before anything is loaded
    _check_tls(keyfile=ssl_keyfile, certfile=ssl_certfile, ca_certs=ssl_ca_certs)
    template_kwargs = parse_json_object("--default-chat-template-kwargs", default_chat_template_kwargs)
    overrides = parse_json_object("--override-generation-config", override_generation_config)
    if missing := next((name for name in _PACKAGES if find_spec(name) is None), None):
        raise ConfigError(f"the server needs the package '{missing}': install it with pip install 'fledge[server]'")
    listener, source = _bind(host, port) if uds is None else _bind_path(uds), model or TARGET

    with ExitStack() as starting:
        child = _start_child(engine["device"], starting) if backend != "vllm" else None
        from fledge.server.app import run  # noqa: PLC0415 - torch takes seconds
        from fledge.server.base_service import BaseService  # noqa: PLC0415
        from fledge.server.connections import is_loopback  # noqa: PLC0415
        from fledge.server.options import ServeOptions  # noqa: PLC0415
        from fledge.server.request_log import set_up_logging  # noqa: PLC0415

        set_up_logging(log_format)
        directory = resolve(source, weights=False)
        if backend != "vllm" and (reason := _unsupported_reason(directory)) is not None:
            if backend == "fledge":
                raise NeedsVllmError(f"{source}: {reason}")
            print(f"note: {source}: {reason} (--engine auto: vLLM)", file=sys.stderr)
            backend = "vllm"
            starting.close()
        by_vllm = backend == "vllm"
        directory = directory if by_vllm else resolve(source)
        words = vllm_words(vllm_option or (), bundled_pair=model is None) if by_vllm else []
        named = vllm_values(words, "--served-model-name") if by_vllm else served_model_name
        names, is_private = allowed_host or [], is_loopback(host) and uds is None and not keys
        settings = from_options(
            ServeOptions,
            locals(),
            served_model_names=tuple(named or (source,)),
            api_keys=tuple(keys),
            admin_api_keys=(*(admin_api_key or ()), *filter(None, [os.environ.get("FLEDGE_ADMIN_API_KEY")])),
            chat_template=template,
            chat_template_name=None if chat_template is None else Path(chat_template).stem,
            disable_any_whitespace=_disables_any_whitespace(structured_outputs_config),
            cors_origins=tuple(_origins(cors_origin or [])),
            allowed_hosts=() if "*" in names or not (names or is_private) else ("localhost", *names),
            root_path=root_path.rstrip("/"),
            default_chat_template_kwargs=template_kwargs,
            default_sampling={} if by_vllm else _sampling_defaults(directory, generation_config, overrides),
            seed=engine["seed"],
        )
        where = f"port {listener.getsockname()[1]}" if uds is None else uds
        print(f"loading {source}, to be served at {where}", file=sys.stderr, flush=True)
        service: BaseService
        if by_vllm:
            options = VllmOptions(words=words, python=vllm_python, log_file=vllm_log, start_timeout=vllm_start_timeout)
            service, description = open_vllm_proxy(source, directory, options, settings)
        else:
            service, description = _open_service(
                source, directory, speculation, engine, settings, threads, log_format, child
            )
            starting.pop_all()
    scheme = "http" if ssl_certfile is None else "https"

    def ready(bound: int) -> None:
        shown = f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound}{settings.root_path}"
        shown = shown if uds is None else f"{uds}:{settings.root_path}"
        model_text, engine_text = description
        line = f"serving {model_text}, at {shown} (page: {shown}/, API: {shown}/v1) as {settings.model_name}"
        print(f"{line}, {engine_text}", file=sys.stderr, flush=True)
        if not is_loopback(host) and uds is None and not keys:
            print("warning: anybody who can reach this address can use the server; see --api-key", file=sys.stderr)

    tls = {"ssl_keyfile": ssl_keyfile, "ssl_certfile": ssl_certfile, "ssl_ca_certs": ssl_ca_certs}
    tls |= {} if ssl_ciphers is None else {"ssl_ciphers": ssl_ciphers}
    status = run(service, listener, **tls, ssl_cert_reqs=ssl_cert_reqs, on_ready=ready)
    if uds is not None:
        Path(uds).unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)  # without waiting for other threads


def _check_tls(**files: str | None) -> None:
    if files["keyfile"] is not None and files["certfile"] is None:
        raise ConfigError("--ssl-keyfile: the key of a certificate, and --ssl-certfile is missing")
    for name, file in files.items():
        if file is not None and not Path(file).is_file():
            raise ConfigError(f"--ssl-{name.replace('_', '-')}: {file}: no such file")


def _start_child(device: str, starting: ExitStack) -> "Child":
    """Start the engine's process, which imports its modules while this one does. Closing `starting` kills it."""
    from fledge.server.child import Child  # noqa: PLC0415 - no other command needs it

    child = Child(on_gpu=device in ("auto", "cuda"))
    starting.callback(child.kill)

    def stop(number: int, _frame: object) -> None:
        child.kill()
        os._exit(128 + number)  # an exception might be caught by a module that is being imported

    for number in (signal.SIGINT, signal.SIGTERM):  # until the server handles them
        starting.callback(signal.signal, number, signal.signal(number, stop))
    return child


def _unsupported_reason(directory: Path) -> str | None:
    """Return why our engine cannot run a target, or None."""
    from fledge.checkpoints.target import sketch_target_config  # noqa: PLC0415 - imports torch

    return sketch_target_config(directory)[1]


def _open_service(
    source: str,
    directory: Path,
    speculation: SpeculativeConfig | None,
    engine: Mapping[str, Any],
    settings: "ServeOptions",
    threads: int | None,
    log_format: str,
    child: "Child | None",
) -> tuple["Service", tuple[str, str]]:
    """Load the models in the child; return the service, and a description of model and engine."""
    from fledge.server.engine_process import EngineProcess  # noqa: PLC0415
    from fledge.server.service import Service  # noqa: PLC0415

    drafting = None if speculation is None else asdict(speculation)
    llm = {**engine, "model": str(directory), "speculative_config": drafting}
    process = EngineProcess(llm, threads=threads, log_format=log_format, child=child)
    process.wait_until_ready()
    service, info = Service(process, settings), process.info
    pair = f"{source}, without a drafter"
    if speculation is not None:
        pair = f"{source} with {speculation.model}, {info.max_depth} drafts deep at most"
    return service, (pair, f"on {info.device} in {info.dtype}, room for {info.kv_capacity:,} tokens of KV cache")


def _speculation(model: str | None, config: str | None) -> SpeculativeConfig | None:
    """Return the speculative config: the given one, or the bundled drafter for the bundled target."""
    if config is not None:
        return SpeculativeConfig.from_json(config)
    if model is None:
        return SpeculativeConfig(model=DRAFTERS["EAGLE-3.1"], num_speculative_tokens=BUNDLED_DEPTH)
    return None


def _bind(host: str, port: int) -> socket.socket:
    """Bind the address before anything is loaded. Connections are refused until the server listens."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(address)
        except (
            OSError
        ):  # perhaps by old connections; not set at first, because two servers that set it could share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host}, port {port}: {reason}; see --host and --port") from None
    return listener


def _bind_path(path: str) -> socket.socket:
    """Bind a Unix socket. An existing socket file is replaced if no server listens there."""
    listener, other = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    try:
        with other:
            if Path(path).is_socket() and other.connect_ex(path) == errno.ECONNREFUSED:
                Path(path).unlink()
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {path}: {error.strerror or error}; see --uds") from None
    return listener


def _disables_any_whitespace(config: str | None) -> bool:
    """Return `disable_any_whitespace` of vLLM's JSON; its other fields have no effect here."""
    disabled = parse_json_object("--structured-outputs-config", config).get("disable_any_whitespace", False)
    if not isinstance(disabled, bool):
        raise ConfigError('--structured-outputs-config: expected JSON such as {"disable_any_whitespace": true}')
    return disabled


def _origins(given: list[str]) -> list[str]:
    """Return the origins; each value is one, or a JSON list of them as in vLLM."""
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


def _sampling_defaults(directory: Path, source: str, overrides: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the default sampling parameters of requests, as `vllm serve` does.

    `source`: "auto" (the model's generation_config.json), "vllm" (none), or a directory with another one.
    """
    directory = directory if source == "auto" else Path(source)
    if source not in ("auto", "vllm") and not directory.is_dir():
        raise ConfigError(f"--generation-config: found '{source}', allowed is auto, vllm or a directory")
    if unknown := sorted(set(overrides) - set(SAMPLING_DEFAULTS)):
        hint = nearest_name_hint(unknown[0], SAMPLING_DEFAULTS)
        raise ConfigError(f"--override-generation-config: '{unknown[0]}' cannot be set here.{hint}")
    found = {**({} if source == "vllm" else sampling_defaults(directory)), **overrides}
    SamplingParams(**found)  # raises ConfigError for invalid values
    return found
