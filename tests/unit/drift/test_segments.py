"""Which token of a prompt is whose, for templates that add, trim, merge and drop."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fledge.drift.prompts import ProbePrompt, Segment, segmented
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.errors import PromptError
from tests.tiny_tokenizer import save_tokenizer

TRIMMING = (
    "{{ '^' }}{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
MERGING = (  # the system prompt goes into the first user turn, as Gemma and Mistral do it
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% elif m.role == 'user' %}<u>{{ ns.system }}\n\n{{ m.content }}</u>"
    "{% set ns.system = '' %}{% else %}<a>{{ m.content }}</a>{% endif %}{% endfor %}<a>"
)
THINKING = (  # history is shown without its thinking
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<end>{% endfor %}<assistant>"
)
CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function | tojson }}</call>{% endfor %}<end>{% endfor %}<assistant>"
)
CURIOUS = (  # renders unlike for every text: stand-ins cannot be aligned
    "{% for m in messages %}<{{ m.content | length }}>{{ m.content }}\n{% endfor %}<assistant>"
)


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return load_tokenizer(directory)


def parts(tokenizer: Any, messages: list[dict[str, Any]], template: str | None = None) -> list[tuple[str, str]]:
    """Runs of tokens of the same segment, as (segment, text)."""
    prompt = segmented(ProbePrompt(id="x", category="", messages=messages, chat_template=template), tokenizer)
    runs: list[tuple[Segment, list[int]]] = []
    for token, segment in zip(prompt.token_ids, prompt.segments, strict=True):
        if not runs or runs[-1][0] is not segment:
            runs.append((segment, []))
        runs[-1][1].append(token)
    return [(segment.name.lower(), tokenizer.decode(ids)) for segment, ids in runs]


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_each_message_is_found_even_if_it_looks_like_the_template(tokenizer: Any) -> None:
    messages = [
        message("system", "<user>"),
        message("user", "user"),
        message("assistant", "assistant>\n<user>"),
        message("user", "what? grüß 🙂"),
    ]
    assert parts(tokenizer, messages) == [
        ("template", "<system>"),
        ("system", "<user>"),
        ("template", "\n<user>"),
        ("user", "user"),
        ("template", "\n<assistant>"),
        ("assistant", "assistant>\n<user>"),
        ("template", "\n<user>"),
        ("user", "what? grüß 🙂"),
        ("template", "\n<assistant>"),
    ]
    prompt = segmented(ProbePrompt(id="x", category="", messages=messages), tokenizer)
    assert list(prompt.token_ids) == encode_chat(tokenizer, messages)


def test_trimmed_text_is_what_is_left_of_it(tokenizer: Any) -> None:
    assert parts(tokenizer, [message("user", "  hi there \n"), message("tool", "\n42")], TRIMMING) == [
        ("template", "^[user]\n"),
        ("user", "hi there"),
        ("template", "</>\n[tool]\n"),
        ("tool", "42"),
        ("template", "</>\n[assistant]\n"),
    ]


def test_a_system_prompt_inside_a_user_turn_stays_a_system_prompt(tokenizer: Any) -> None:
    assert parts(tokenizer, [message("system", "be brief"), message("user", "be brief")], MERGING) == [
        ("template", "<u>"),
        ("system", "be brief"),
        ("template", "\n\n"),
        ("user", "be brief"),
        ("template", "</u><a>"),
    ]


def test_text_that_the_template_leaves_out_is_nobodys(tokenizer: Any) -> None:
    messages = [message("user", "q"), message("assistant", "<think>hm</think>yes"), message("user", "r")]
    assert parts(tokenizer, messages, THINKING)[2:5] == [
        ("template", "<end><assistant>"),
        ("assistant", "yes"),
        ("template", "<end><user>"),
    ]


def test_tool_calls_are_the_assistants(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 'x"y', "b": 2}}}
    messages = [message("user", "1+2"), message("assistant", "", tool_calls=[call]), message("tool", "3")]
    found = parts(tokenizer, messages, CALLS)
    assert [text for segment, text in found if segment == "assistant"] == ["add", 'x\\"y']
    assert ("tool", "3") in found


def test_content_may_come_in_parts(tokenizer: Any) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert parts(tokenizer, [message("user", content)], template) == [
        ("template", "<user>"),
        ("user", "one"),
        ("template", "|"),
        ("user", "two"),
        ("template", "|"),
    ]


def test_a_template_that_counts_characters_is_searched_instead(tokenizer: Any) -> None:
    assert parts(tokenizer, [message("system", "12345"), message("user", "abc")], CURIOUS) == [
        ("template", "<5>"),
        ("system", "12345"),
        ("template", "\n<3>"),
        ("user", "abc"),
        ("template", "\n<assistant>"),
    ]


def test_a_token_across_a_boundary_is_the_messages() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate([*alphabet, ">h"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(">", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %};"
    assert parts(tokenizer, [message("user", "hi")], template) == [
        ("template", "<user"),
        ("user", ">hi"),
        ("template", ";"),
    ]


def test_other_prompts(tokenizer: Any) -> None:
    text = segmented(ProbePrompt(id="x", category="", text="héy"), tokenizer)
    assert set(text.segments) == {Segment.PROMPT}
    assert tokenizer.decode(list(text.token_ids)) == "héy"
    ids = segmented(ProbePrompt(id="x", category="", token_ids=(4, 5)), None)
    assert ids.token_ids == (4, 5)
    assert ids.segments == (Segment.PROMPT, Segment.PROMPT)
    noisy = ProbePrompt(id="x", category="", token_ids=(4, 5), segments=(Segment.TEMPLATE, Segment.USER))
    assert segmented(noisy, None).segments == (Segment.TEMPLATE, Segment.USER)


def test_refusals(tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="has no tokenizer"):
        segmented(ProbePrompt(id="x", category="", text="hi"), None)
    with pytest.raises(PromptError, match="conversation 'x': expected messages, text or token ids"):
        segmented(ProbePrompt(id="x", category=""), tokenizer)
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="refuses them: roles must alternate"):
        segmented(ProbePrompt(id="x", category="", messages=[message("user", "a")], chat_template=refusing), tokenizer)
