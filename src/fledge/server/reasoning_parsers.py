"""Reasoning parsers by name, and how one is chosen by the chat template."""

from typing import ClassVar

from fledge.server.harmony import CHANNEL, HarmonyParser
from fledge.server.parsers import ReasoningParser, parser_by_name


class MistralReasoning(ReasoningParser):
    """`[THINK]` ... `[/THINK]`."""

    START_MARKERS: ClassVar = ("[THINK]",)
    END_MARKERS: ClassVar = ("[/THINK]",)


class SeedReasoning(ReasoningParser):
    """`<seed:think>` ... `</seed:think>`."""

    START_MARKERS: ClassVar = ("<seed:think>",)
    END_MARKERS: ClassVar = ("</seed:think>",)


class GraniteReasoning(ReasoningParser):
    """`Here is my thought process:` ... `Here is my response:`, also with `Here's`."""

    START_MARKERS: ClassVar = ("Here is my thought process:", "Here's my thought process:")
    END_MARKERS: ClassVar = ("Here is my response:", "Here's my response:")


# vLLM's names for --reasoning-parser. Most model families use the same markers.
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    **dict.fromkeys(
        """think deepseek_r1 deepseek_v3 glm45 glm47 holo2 kimi_k2 mimo minimax_m2 nemotron_v3 olmo3 qwen3 step3
        step3p5""".split(),  # noqa: SIM905
        ReasoningParser,
    ),
    "mistral": MistralReasoning,
    "seed_oss": SeedReasoning,
    "granite": GraniteReasoning,
    "openai_gptoss": HarmonyParser,
    "gpt_oss": HarmonyParser,
}

# A marker in the chat template, and its parser; the first match counts.
_BY_TEMPLATE = (
    (f"{CHANNEL}analysis", HarmonyParser),
    (ReasoningParser.END_MARKERS[0], ReasoningParser),
    (SeedReasoning.END_MARKERS[0], SeedReasoning),
    (MistralReasoning.END_MARKERS[0], MistralReasoning),
    (GraniteReasoning.END_MARKERS[0], GraniteReasoning),
)


def reasoning_parser(name: str | None, template: str | None = None) -> type[ReasoningParser] | None:
    """Return the parser of that name; None or "auto": the one that fits the chat template. Raises ConfigError."""
    found = next((parser for marker, parser in _BY_TEMPLATE if marker in (template or "")), None)
    return parser_by_name("reasoning", name or "auto", REASONING_PARSERS, found)
