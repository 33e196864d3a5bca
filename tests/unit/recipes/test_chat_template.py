"""The bundled chat template: as the models were trained where there are no tools, Hermes' way where there are."""

from pathlib import Path

from fledge.checkpoints.source import resolve
from fledge.engine.tokenizer import load_tokenizer
from fledge.server.tool_parsers import HermesParser, tool_parser
from recipes.demo.tokenizer import CHAT_TEMPLATE

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TURNS = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
TRAINED = "<|begin_of_text|><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"


def render(messages: list[dict[str, object]], **options: object) -> str:
    tokenizer = load_tokenizer(Path(resolve("fledgling")))
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))


def test_the_bundled_file_is_the_recipes_and_its_calls_are_read() -> None:
    assert (resolve("fledgling") / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert tool_parser(None, CHAT_TEMPLATE) is HermesParser


def test_without_tools_nothing_has_changed() -> None:
    assert render([*TURNS]) == TRAINED + ANSWER
    longer = [*TURNS, {"role": "assistant", "content": "A"}, {"role": "tool", "content": "T"}]
    assert render(longer) == TRAINED + f"{ANSWER}A<|im_end|>\n<|im_start|>tool\nT<|im_end|>\n" + ANSWER


def test_tools_are_shown_and_calls_written_as_they_are_read() -> None:
    text = render([*TURNS, {"role": "assistant", "content": "", "tool_calls": [CALL]}], tools=[TOOL])
    assert text.startswith("<|begin_of_text|><|im_start|>system\nS\n\n# Tools")
    assert '"name": "add"' in text.partition("</tools>")[0]
    assert text.count("<|im_start|>system") == 1
    written = text.rpartition(ANSWER)[0].rpartition(ANSWER)[2].removesuffix("<|im_end|>\n")
    parser = HermesParser()
    deltas = parser.feed(written) + parser.feed("", final=True)
    assert "".join(part["function"]["arguments"] for one in deltas for part in one["tool_calls"]) == '{"a": 1}'
    assert "# Tools" in render([TURNS[1]], tools=[TOOL])
