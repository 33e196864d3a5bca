"""Tool calls: what models write, read back into OpenAI's shape as it comes.

get_parser(name) or detect_parser(template)  ->  a ToolParser class; an instance of it reads one answer
read_tools(request's fields)  ->  ToolRequest  ->  call_grammar: enforces "required" and a named tool
"""

from fledge.errors import ConfigError, nearest_name_hint
from fledge.server.tools.base import Delta, Tool, ToolParser, whole_message
from fledge.server.tools.json_calls import HermesParser, Llama3Parser
from fledge.server.tools.kimi_k2 import KimiK2Parser
from fledge.server.tools.request import ToolChoice, ToolRequest, call_grammar, read_tools

__all__ = [
    "PARSERS",
    "Delta",
    "HermesParser",
    "Tool",
    "ToolChoice",
    "ToolParser",
    "ToolRequest",
    "call_grammar",
    "detect_parser",
    "get_parser",
    "read_tools",
    "whole_message",
]

# Under vLLM's names for --tool-call-parser, and what else people call them.
PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3Parser,
    "llama3": Llama3Parser,
    "kimi_k2": KimiK2Parser,
}


def get_parser(name: str) -> type[ToolParser]:
    """Return the parser of that name. Raises ConfigError."""
    if name not in PARSERS:
        raise ConfigError(f"unknown tool parser '{name}'.{nearest_name_hint(name, PARSERS)}")
    return PARSERS[name]


def detect_parser(chat_template: str | None) -> type[ToolParser] | None:
    """Return the parser for what a chat template tells its model to write; None if it is none that we know."""
    template = chat_template or ""
    if "<|tool_calls_section_begin|>" in template:
        return KimiK2Parser
    if "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder writes XML inside
        return HermesParser
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return Llama3Parser
    return None
