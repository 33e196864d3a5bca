"""Reasoning is split from the answer, whole or streamed, alone or before tool calls."""

import itertools
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.engine.outputs import TextPiece
from fledge.errors import ConfigError
from fledge.server.async_engine import TextDelta
from fledge.server.completions import ChatChoice, token_texts
from fledge.server.harmony import HarmonyParser, HarmonyTools
from fledge.server.parsers import AnswerParser, ReasoningParser, merge_deltas
from fledge.server.prompts import normalize_messages
from fledge.server.protocol import ChatRequest
from fledge.server.reasoning_parsers import GraniteReasoning, MistralReasoning, SeedReasoning, reasoning_parser
from fledge.server.tool_parsers import HermesParser, tool_parser

CASES = [
    ("<think>\nhm, so\n</think>\n\nYes.\n", False, "hm, so", "Yes.\n"),
    ("\n<think>a</think>b", False, "a", "b"),
    ("hm, so\n</think>\n\nYes.", True, "hm, so", "Yes."),
    ("<think></think>Yes.", False, None, "Yes."),
    ("</think>\n\nYes.", True, None, "Yes."),
    ("<think>never ends\n", False, "never ends", None),
    ("never ends", True, "never ends", None),
    ("No thoughts.", False, None, "No thoughts."),
    (" No thoughts.", False, None, " No thoughts."),
    ("Late <think>x</think>", False, None, "Late <think>x</think>"),
    ("Only </think> a close", False, None, "Only </think> a close"),
    ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
    ("a </thin k> b</think>c", True, "a </thin k> b", "c"),
    ("<thi", False, None, "<thi"),
    ("cut </thi", True, "cut </thi", None),
    ("", False, None, None),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), CASES)
def test_whole_and_character_by_character(text: str, opened: bool, reasoning: str | None, content: str | None) -> None:
    for pieces in ([text], list(text)):
        parser = ReasoningParser(opened=opened)
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.feed("", final=True)
        message = merge_deltas(deltas)
        assert message.get("reasoning_content") == reasoning
        assert message["content"] == (content or "")
        assert all(all(delta.values()) for delta in deltas)


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
HARMONY = [
    (f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.<|return|>", "Hm.", "Yes.", []),
    (f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.", "Hm.", "Yes.", []),
    (f"{FINAL}Yes.", None, "Yes.", []),
    ("Yes.", None, "Yes.", []),  # after a prompt that has begun the answer
    (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c", "a\nb", "c", []),
    (f'{ANALYSIS}Hm.<|end|><|start|>assistant{TO_F}{{"a": 1}}<|call|>', "Hm.", None, [("f", '{"a": 1}')]),
    ('to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', None, None, [("f", '{"a": 1}')]),
    ('<|start|>assistant to=f<|channel|>analysis<|message|>{"a": 1}<|call|>', None, None, [("f", '{"a": 1}')]),
    (f"<|channel|>commentary<|message|>So:<|end|><|start|>assistant{TO_F}{{", None, "So:", [("f", "{")]),
    (f"{TO_F}1<|call|><|start|>assistant{TO_F}2", None, None, [("f", "1"), ("f", "2")]),
    ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", None, None, []),
    (f"{ANALYSIS}cut{FINAL}Yes.", "cut", "Yes.", []),  # without its end
    (f"{ANALYSIS}Hm.<|end|><|start|>assistant<|chan", "Hm.", None, []),
    (f"{ANALYSIS}Hm.<|en", "Hm.<|en", None, []),
    ("<|channel|>" + "x" * 300, None, "x" * 300, []),
    ("", None, None, []),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), HARMONY)
def test_harmony(text: str, reasoning: str | None, content: str | None, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        parser = AnswerParser(HarmonyParser(), HarmonyTools())
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.feed("", final=True)
        message = merge_deltas(deltas)
        found = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
        assert (message.get("reasoning"), message["content"] or None, found) == (reasoning, content, calls)
        assert [one["index"] for delta in deltas for one in delta.get("tool_calls", ()) if "id" in one] == list(
            range(len(calls))
        )


def test_harmony_is_found_by_its_template() -> None:
    template = "<|channel|>analysis<|message|>{{ x }}<|end|> ... <|channel|>commentary json<|message|>"
    assert (reasoning_parser(None, template), tool_parser(None, template)) == (HarmonyParser, HarmonyTools)
    assert (reasoning_parser("openai_gptoss"), tool_parser("openai")) == (HarmonyParser, HarmonyTools)
    (made,) = normalize_messages([{"role": "assistant", "content": "Yes.", "reasoning": "Hm."}])
    assert made["thinking"] == "Hm."


@pytest.mark.parametrize("kind", [ReasoningParser, MistralReasoning, SeedReasoning, GraniteReasoning, HarmonyParser])
@settings(max_examples=80, deadline=None)
@given(data=st.data(), opened=st.booleans(), tools=st.booleans())
def test_any_split_gives_what_the_whole_gives(
    kind: type[ReasoningParser], data: st.DataObject, opened: bool, tools: bool
) -> None:
    def parser() -> AnswerParser:
        made = HermesParser() if tools else None
        return AnswerParser(kind(opened=opened, calls=HermesParser.start_markers if tools else ()), made)

    markers = [*kind.START_MARKERS, *kind.END_MARKERS, kind.START_MARKERS[0][:4], kind.END_MARKERS[0][:2]]
    markers += ["<|message|>", TO_F, FINAL] if kind is HarmonyParser else []
    words = ["\n", " ", "x", "<tool_call>", '{"name": "f"}', "</tool_call>"]
    text = "".join(data.draw(st.lists(st.sampled_from([*markers, *words]), max_size=10)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=10)))
    one, whole = parser(), parser()
    with mock.patch("secrets.token_hex", return_value="id"):
        deltas = [d for a, b in itertools.pairwise([0, *cuts, len(text)]) for d in one.feed(text[a:b])]
        deltas += one.feed("", final=True)
        assert merge_deltas(deltas) == merge_deltas(whole.feed(text, final=True))


def test_calls_in_reasoning_are_thoughts() -> None:
    text = (
        '<think>maybe <tool_call>{"name": "a"}</tool_call>?</think>\n'
        'Ok. <tool_call>{"name": "b", "arguments": {}}</tool_call>'
    )
    parser = AnswerParser(ReasoningParser(calls=HermesParser.start_markers), HermesParser())
    answer = merge_deltas(parser.feed(text, final=True))
    assert answer["reasoning_content"] == 'maybe <tool_call>{"name": "a"}</tool_call>?'
    assert (answer["content"], [call["function"]["name"] for call in answer["tool_calls"]]) == ("Ok.", ["b"])
    forgotten = AnswerParser(ReasoningParser(calls=HermesParser.start_markers), HermesParser())
    answer = merge_deltas(forgotten.feed('<think>So: <tool_call>{"name": "a"}</tool_call>', final=True))
    assert (answer["reasoning"], [call["function"]["name"] for call in answer["tool_calls"]]) == ("So:", ["a"])
    plain = AnswerParser()
    assert plain.feed(text, final=True) == [{"content": text}]


def test_parsers_are_found_and_know_what_the_template_opened() -> None:
    assert reasoning_parser("qwen3") is ReasoningParser
    with pytest.raises(ConfigError, match=r"unknown reasoning parser 'qwen4'\. Did you mean 'qwen3'"):
        reasoning_parser("qwen4")
    assert reasoning_parser(None, None) is None
    assert reasoning_parser(None, "{{ messages }}") is None
    parser = reasoning_parser(None, "{{ content.split('</think>') }}")
    assert parser is not None
    assert parser.opened_by("<|im_start|>assistant\n<think>\n")
    assert not parser.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not parser.opened_by("what is <think> for?<|im_end|>\n<|im_start|>assistant\n")


def test_reasoning_goes_both_ways_under_both_names() -> None:
    message = merge_deltas(AnswerParser(ReasoningParser()).feed("<think>Hm.</think>Yes.", final=True))
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("Hm.", "Hm.", "Yes.")
    for name in ("reasoning", "reasoning_content"):
        (made,) = normalize_messages([{"role": "assistant", "content": "Yes.", name: "Hm."}])
        assert (made["reasoning"], made["reasoning_content"]) == ("Hm.", "Hm.")
    choice = ChatChoice(0, ChatRequest(messages=[]), token_texts(None), AnswerParser(ReasoningParser()))
    choice.add(TextDelta((TextPiece("<think>Hm.</think>", False),), [], []))
    assert {"reasoning": "Hm.", "reasoning_content": "Hm."} in [chunk["delta"] for chunk in choice.chunks()]
