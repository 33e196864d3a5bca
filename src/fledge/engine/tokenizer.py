"""Loading of the target's tokenizer, and its chat template."""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jinja2 import TemplateError

from fledge.errors import CheckpointError, PromptError
from fledge.files import read_json
from fledge.progress import timed

_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_log = logging.getLogger("fledge.engine")
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(directory: Path) -> Any | None:
    """Return the tokenizer; None if the directory has none (such a model is used with token ids)."""
    if not any((directory / name).is_file() for name in _FILES):
        return None
    with timed(_log, "transformers imported, aside"):  # here, as it takes a second that other commands need not wait
        from transformers import AutoTokenizer  # noqa: PLC0415
    try:
        config = _config_for(directory)
        with timed(_log, "tokenizer read, aside"):
            # The default of trust_remote_code, None, asks on the terminal.
            tokenizer = AutoTokenizer.from_pretrained(str(directory), config=config, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for broken files
        reason = str(error).strip().splitlines()
        if "trust_remote_code" in str(error):
            reason = ["it wants to run code of its own (auto_map), which Fledge never does; remove auto_map"]
        raise CheckpointError(f"{directory}: the tokenizer cannot be loaded: {(reason or [repr(error)])[0]}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CheckpointError(f"{directory}: only fast tokenizers (tokenizer.json) are supported")
    tokenizer.model_max_length = sys.maxsize  # no warnings of transformers: engines refuse prompts that are too long
    return tokenizer


def _config_for(directory: Path) -> Any | None:
    """Return a stand-in for the target's config with all that `AutoTokenizer` needs for a tokenizer of a plain class.

    None for other classes: `AutoTokenizer` then reads the config into its family's class, which imports torch.compile
    and half of transformers, a second and a half in each process.
    """
    own, config = (read_json(directory / name) or {} for name in ("tokenizer_config.json", "config.json"))
    family, has_code = config.get("model_type"), "auto_map" in own or "auto_map" in config
    if own.get("tokenizer_class") in _PLAIN_CLASSES and isinstance(family, str) and not has_code:
        return SimpleNamespace(model_type=family, model_name=config.get("model_name"), _name_or_path=str(directory))
    return None


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Apply the chat template; return token ids, up to the start of the assistant's answer."""
    if not messages or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise PromptError("messages: expected a non-empty list of objects with 'role' and 'content'")
    if tokenizer.chat_template is None:
        raise PromptError("this target's tokenizer has no chat template; give a plain prompt instead")
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except TemplateError as error:
        raise PromptError(f"messages: the chat template refuses them: {error}") from None
    return [int(token) for token in ids]
