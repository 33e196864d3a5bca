"""`fledge serve`: an OpenAI-compatible server. Takes the command line of `vllm serve`."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fledge.checkpoints.source import DRAFTERS, TARGET, resolve
from fledge.cli.command import engine_options, options
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.errors import ConfigError
from fledge.files import read_json

BUNDLED_DEPTH = 5
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_INTERNAL = {"speculative_config", "block_size", "num_blocks", "cudagraph_capture_sizes", "pack_weights", "read_late"}
ENGINE_OPTIONS = tuple(one.name for one in fields(EngineConfig) if one.name not in _INTERNAL)


@options("serve")
@engine_options(*ENGINE_OPTIONS)
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
    allow_client_templates: bool = False,
    cors_origin: list[str] | None = None,
    root_path: str = "",
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
    max_queue: int = 256,
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

    try:
        from fledge.server.app import run  # noqa: PLC0415 - torch takes seconds
        from fledge.server.engine_process import EngineProcess  # noqa: PLC0415
        from fledge.server.options import ServeOptions  # noqa: PLC0415
        from fledge.server.request_log import set_up_logging  # noqa: PLC0415
        from fledge.server.service import Service, check_options  # noqa: PLC0415
    except ModuleNotFoundError as error:
        message = f"the server needs the package '{error.name}': install it with pip install 'fledge[server]'"
        raise ConfigError(message) from None
    set_up_logging(log_format)
    source = model or TARGET
    directory = resolve(source)
    settings = ServeOptions(
        served_model_names=tuple(served_model_name or (source,)),
        api_keys=tuple(keys),
        chat_template=template,
        chat_template_name=None if chat_template is None else Path(chat_template).stem,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        allow_client_templates=allow_client_templates,
        cors_origins=tuple(_origins(cors_origin or [])),
        root_path=root_path.rstrip("/"),
        max_queue=max_queue,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        default_sampling=_sampling_defaults(directory, generation_config),
        seed=engine["seed"],
    )
    check_options(settings)
    drafting = None if speculation is None else asdict(speculation)
    llm = {**engine, "model": str(directory), "speculative_config": drafting}
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
        names = f"serving {settings.model_name} at {shown} (page: {shown}/, API: {shown}/v1)"
        print(names, file=sys.stderr, flush=True)
        if host not in ("127.0.0.1", "localhost", "::1") and not keys:
            print("warning: anybody who can reach this address can use the server; see --api-key", file=sys.stderr)

    status = run(service, host=host, port=port, ssl_keyfile=ssl_keyfile, ssl_certfile=ssl_certfile, on_ready=ready)
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


def _origins(given: list[str]) -> list[str]:
    """Each value is an origin, or vLLM's JSON list of them."""
    found: list[str] = []
    for value in given:
        try:
            listed = json.loads(value) if value.startswith("[") else [value]
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
