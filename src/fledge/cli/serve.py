"""`fledge serve`: an OpenAI-compatible server. Takes the command line of `vllm serve`."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fledge.checkpoints.source import DRAFTERS, TARGET, resolve
from fledge.cli.options import Threads, engine_options
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.errors import ConfigError
from fledge.files import read_json

BUNDLED_DEPTH = 5
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


ENGINE_OPTIONS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "dtype",
    "device",
    "gpu_memory_utilization",
    "kv_cache_bytes",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "enforce_eager",
    "seed",
)


@engine_options(*ENGINE_OPTIONS)
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="Target model: a directory or a Hugging Face name. The bundled pair if left out."),
    ] = None,
    *,
    speculative_config: Annotated[str | None, typer.Option(help="vLLM's JSON: which drafter, how deep.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; several may be given. Or FLEDGE_API_KEY.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that clients use; several may be given.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="File with a chat template, instead of the tokenizer's.")
    ] = None,
    generation_config: Annotated[
        str, typer.Option(help="auto: sampling defaults from the model's generation_config.json; vllm: none.")
    ] = "auto",
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", help="Always on where it is known how the model calls tools.")
    ] = False,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="hermes, llama3_json, kimi_k2 or none; found by the chat template if left out.")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="deepseek_r1, qwen3, ... or none; found by the chat template if left out.")
    ] = None,
    allow_client_templates: Annotated[
        bool, typer.Option("--allow-client-templates", help="Take chat templates from clients that you trust.")
    ] = False,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Web origin whose pages may call the server.")] = None,
    root_path: Annotated[str, typer.Option(help="Path prefix that a proxy in front takes off.")] = "",
    ssl_keyfile: Annotated[str | None, typer.Option(help="For HTTPS.")] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="For HTTPS.")] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more get 429.")] = 256,
    request_timeout: Annotated[float, typer.Option(help="Seconds a request may take.")] = 600.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds for running answers after SIGTERM.")] = 30.0,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    threads: Threads = None,
    engine: Mapping[str, Any],
) -> None:
    """Serve a model with OpenAI's API, and a page that shows whether speculation pays."""
    del enable_auto_tool_choice  # vLLM's consent to read tool calls; here a request's `tools` is enough
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
        raise ConfigError(
            f"the server needs the package '{error.name}': install it with pip install 'fledge[server]'"
        ) from None
    set_up_logging(log_format)
    source = model or TARGET
    directory = resolve(source)
    options = ServeOptions(
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
    check_options(options)
    settings = {
        **engine,
        "model": str(directory),
        "speculative_config": None if speculation is None else asdict(speculation),
    }
    process = EngineProcess(settings, threads=threads, log_format=log_format)
    try:
        process.wait_until_ready()
        service = Service(process, options)
    except BaseException:
        process.kill()
        raise
    scheme = "http" if ssl_certfile is None else "https"

    def ready(bound: int) -> None:
        shown = f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound}{options.root_path}"
        print(f"serving {options.model_name} at {shown} (page: {shown}/, API: {shown}/v1)", file=sys.stderr, flush=True)
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
