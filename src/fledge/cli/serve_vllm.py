"""`fledge serve --engine vllm`: check the pair, start vLLM, and serve it through a proxy."""

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.checkpoints.source import DRAFTERS, bundled_directory, resolve
from fledge.cli.vllm_command import remove_option, speed_options, vllm_speculation, vllm_values
from fledge.errors import ConfigError
from fledge.files import read_json
from fledge.vllm_process import extension
from fledge.vllm_process.finding import find_vllm
from fledge.vllm_process.process import VllmProcess

if TYPE_CHECKING:
    from fledge.engine.vllm_tuning import VllmTuning
    from fledge.server.options import ServeOptions
    from fledge.server.prompts import Template
    from fledge.server.vllm_proxy import VllmProxy

BUNDLED_DEPTH = 5  # num_speculative_tokens of the bundled pair, for both engines
MAX_NUM_SEQS = 256  # vLLM's default on most machines, for our limit of requests
_REQUEST_METRICS = "--per-request-spec-decode-metrics"
_EXTENSION = "--worker-extension-cls"
_REPLICAS = "--data-parallel-size"


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """How to run vLLM. `words`: arguments of its command line; `python`: which installation."""

    words: Sequence[str] = field(default_factory=tuple)
    python: str | None = None
    log_file: Path | None = None
    start_timeout: float = 1800.0


def vllm_words(words: Sequence[str], *, bundled_pair: bool) -> list[str]:
    """Return vLLM's arguments, with the bundled drafter for the bundled target unless another is given."""
    if "--headless" in words:
        advice = "run vLLM itself on this node, and fledge serve on the one with the API server"
        raise ConfigError(f"--headless: there is nothing to stand in front of; {advice}")
    if bundled_pair and vllm_speculation(words) is None:
        config = {"model": DRAFTERS["EAGLE-3.1"], "num_speculative_tokens": BUNDLED_DEPTH}
        return [*words, "--speculative-config", json.dumps(config)]
    return list(words)


def open_vllm_proxy(
    source: str, directory: Path, options: VllmOptions, settings: "ServeOptions"
) -> tuple["VllmProxy", tuple[str, str]]:
    """Check the pair, start vLLM and wait for it; return the proxy, and a description of model and engine.

    `directory`: the target's; config and tokenizer are enough.
    """
    from fledge.engine.vllm_pair import check_exchange, check_pair, is_eagle  # noqa: PLC0415 - torch takes seconds
    from fledge.server.vllm_proxy import DrafterReload, VllmProxy  # noqa: PLC0415

    installation = find_vllm(options.python)
    if installation.warning:
        print(f"warning: {installation.warning}", file=sys.stderr)
    words = list(options.words)
    speculation, tuning = vllm_speculation(words), None
    if speculation is not None:
        speculation = check_pair(directory, speculation)
        tuning = recall_tuning(directory, speculation, words, installation.version)
        speculation = with_measured_depths(speculation, tuning, words)
        words = [*remove_option(words, "--speculative-config"), "--speculative-config", json.dumps(speculation)]
    if not vllm_values(words, "--served-model-name"):
        words += ["--served-model-name", source]
    if speculation is not None and not vllm_values(words, _REQUEST_METRICS) and installation.has_request_metrics:
        words += [_REQUEST_METRICS, "detailed"]
    reload, environment = None, {}
    if settings.admin_api_keys and speculation and is_eagle(speculation) and not vllm_values(words, _EXTENSION):
        reload = DrafterReload(secrets.token_hex(16), partial(check_exchange, directory, speculation))
        words += [_EXTENSION, "fledge_drafter.DrafterWorker", "--middleware", "fledge_drafter.DrafterRoute"]
        environment = extension.environment(reload.token)
    model = str(bundled_directory(source) or source)
    process = VllmProcess(installation, model, words, environment=environment, log_file=options.log_file)
    try:
        process.wait_until_ready(options.start_timeout)
        drafter = None if speculation is None else str(speculation.get("model") or speculation["method"])
        proxy = VllmProxy(
            process,
            settings,
            max_num_seqs=_number(words, "--max-num-seqs", MAX_NUM_SEQS) * _number(words, _REPLICAS, 1),
            drafter=drafter,
            template=_template(directory, words),
            reports_rounds=vllm_values(words, _REQUEST_METRICS) not in ([], ["none"]),
            reload=reload,
            speculation=speculation,
            tuning=tuning,
        )
    except BaseException:
        process.stop()
        raise
    pair = f"{source}, without a drafter"
    if speculation is not None:
        pair = f"{source} with {drafter}, {speculation.get('num_speculative_tokens', 'some')} drafts deep"
    return proxy, (pair, f"by vLLM {installation.version}")


def _number(words: Sequence[str], name: str, default: int) -> int:
    """Return the value of a numeric option of vLLM, or `default`. vLLM refuses invalid values itself."""
    value = "".join(vllm_values(words, name))
    return int(value) if value.isdecimal() else default


def recall_tuning(
    directory: Path, speculation: Mapping[str, Any], words: Sequence[str], version: str
) -> "VllmTuning | None":
    """Return the measurements of `fledge bench serve --tune` for this pair, if there are any."""
    from fledge.engine.vllm_pair import is_eagle  # noqa: PLC0415
    from fledge.engine.vllm_tuning import VllmTuning  # noqa: PLC0415

    if not is_eagle(speculation):
        return None
    return VllmTuning.recall(VllmTuning.file(directory, resolve(speculation["model"]), version, speed_options(words)))


def with_measured_depths(
    speculation: dict[str, Any], tuning: "VllmTuning | None", words: Sequence[str]
) -> dict[str, Any]:
    """Add the measured depths by batch size, unless the config has such a table already."""
    key, deepest = "num_speculative_tokens_per_batch_size", speculation.get("num_speculative_tokens")
    has_table = _number(words, _REPLICAS, 1) == 1  # vLLM ignores it with several
    if tuning is None or key in speculation or not isinstance(deepest, int) or not has_table:
        return speculation
    rows = tuning.table(deepest)
    if rows is None:
        return speculation
    table = f"{json.dumps(rows)}, which `fledge bench serve --tune` measured to pay on {tuning.date}"
    print(f"note: drafting by batch size as {table} (or give {key})", file=sys.stderr)
    return {**speculation, key: rows}


def _template(directory: Path, words: Sequence[str]) -> "Template":
    """Return the chat template that vLLM uses."""
    from fledge.server.prompts import NO_TEMPLATE, Template  # noqa: PLC0415

    name, text = "default", None
    if given := vllm_values(words, "--chat-template"):
        file = Path(given[0])
        name, text = file.stem, file.read_text(encoding="utf-8") if file.is_file() else given[0]
    elif (file := directory / "chat_template.jinja").is_file():
        text = file.read_text(encoding="utf-8")
    else:
        text = (read_json(directory / "tokenizer_config.json") or {}).get("chat_template")
    if not isinstance(text, str):
        return NO_TEMPLATE if text is None else Template(name, "")
    return Template.of(name, text)
