"""The target's tokenizer and chat template, with errors in words."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from fledge.errors import CheckpointError, PromptError

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(directory: Path) -> Any | None:
    """Return the tokenizer, or None when the directory has none (such a model takes and gives token ids)."""
    if not any((directory / name).is_file() for name in _FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)  # None: it would ask
    except Exception as error:  # transformers raises whatever the file made it stumble over
        reason = str(error).strip().splitlines()
        if "trust_remote_code" in str(error):
            reason = ["it wants to run code of its own (auto_map), which Fledge never does; remove auto_map"]
        raise CheckpointError(f"{directory}: the tokenizer cannot be loaded: {(reason or [repr(error)])[0]}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CheckpointError(f"{directory}: only fast tokenizers (tokenizer.json) are supported")
    tokenizer.model_max_length = sys.maxsize  # transformers would warn of long prompts; whoever runs them refuses them
    return tokenizer


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of a conversation through the chat template, ready for the assistant's answer."""
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
