"""Chat template families: how other models write conversations down.

A target's own tokenizer renders them. Markers of another family (`[INST]`, `<|eot_id|>`) are special tokens only where
that tokenizer knows them, and ordinary text elsewhere: what a target meets when it is served behind the wrong template.
A family that starts with a begin-of-text token starts with the tokenizer's own, where it has one.
"""

from functools import cache
from importlib.resources import files

from fledge.errors import ConfigError, nearest_name_hint

FAMILIES = ("chatml", "llama3", "mistral", "gemma", "alpaca", "vicuna", "deepseek", "kimi", "plain")


@cache
def chat_template(family: str) -> str:
    """Return a family's template as Jinja text, for `Conversation.chat_template`."""
    if family not in FAMILIES:
        raise ConfigError(f"unknown chat template family '{family}'.{nearest_name_hint(family, FAMILIES)}")
    path = files("fledge.drift") / "chat_templates" / f"{family}.jinja"
    return path.read_text(encoding="utf-8").rstrip("\n")
