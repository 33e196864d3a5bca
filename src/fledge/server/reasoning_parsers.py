"""Reasoning as model families mark it, and which parser reads whom."""

from typing import ClassVar

from fledge.server.harmony import CHANNEL, HarmonyParser
from fledge.server.parsers import ReasoningParser, named_parser


class MistralReasoning(ReasoningParser):
    """`[THINK]` ... `[/THINK]`."""

    BEGINS: ClassVar = ("[THINK]",)
    ENDS: ClassVar = ("[/THINK]",)


class SeedReasoning(ReasoningParser):
    """`<seed:think>` ... `</seed:think>`."""

    BEGINS: ClassVar = ("<seed:think>",)
    ENDS: ClassVar = ("</seed:think>",)


class GraniteReasoning(ReasoningParser):
    """Two sentences, in either of two spellings."""

    BEGINS: ClassVar = ("Here is my thought process:", "Here's my thought process:")
    ENDS: ClassVar = ("Here is my response:", "Here's my response:")


# Under vLLM's names for --reasoning-parser. Most families write the same markers.
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

# What a chat template has in it that knows about reasoning; the first that fits.
_IN_TEMPLATES = (
    (f"{CHANNEL}analysis", HarmonyParser),
    (ReasoningParser.ENDS[0], ReasoningParser),
    (SeedReasoning.ENDS[0], SeedReasoning),
    (MistralReasoning.ENDS[0], MistralReasoning),
    (GraniteReasoning.ENDS[0], GraniteReasoning),
)


def reasoning_parser(name: str | None, template: str | None = None) -> type[ReasoningParser] | None:
    """`named_parser`, found if the chat template knows about reasoning."""
    found = next((parser for marker, parser in _IN_TEMPLATES if marker in (template or "")), None)
    return named_parser("reasoning", name or "auto", REASONING_PARSERS, found)
