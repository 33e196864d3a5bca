"""Masks are exact: the answer and its end token, nothing of the prompt, whatever the template does."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.engine.tokenizer import encode_chat
from fledge.errors import PromptError
from fledge.training.data.rendering import Rendered, Renderer, chain
from tests.unit.training.data import templates
from tests.unit.training.data.templates import chat, make_tokenizer


def renderer(template: str, eos: str = "<|im_end|>", merges: tuple[str, ...] = ()) -> Renderer:
    tokenizer = make_tokenizer(template, eos=eos, merges=merges)
    return Renderer(tokenizer, [tokenizer.eos_token_id])


def render(made: Renderer, messages: list[dict[str, str]]) -> list[Rendered]:
    (sequences,) = made.conversations([made.turn_texts(messages)])
    return sequences


def answers(made: Renderer, sequence: Rendered) -> list[str]:
    """The text of each run of answer tokens."""
    runs: list[list[int]] = []
    inside = False
    for token, answer in zip(sequence.tokens, sequence.answer, strict=True):
        if answer:
            runs = runs if inside else [*runs, []]
            runs[-1].append(token)
        inside = answer
    return [made.tokenizer.decode(run) for run in runs]


def text(made: Renderer, sequence: Rendered) -> str:
    decoded: str = made.tokenizer.decode(sequence.tokens)
    return decoded


STYLES: dict[str, tuple[str, str, list[str]]] = {
    "chatml": (templates.CHATML, "<|im_end|>", ["fine<|im_end|>", "bye, you<|im_end|>"]),
    "llama3": (templates.LLAMA3, "<|eot|>", ["fine<|eot|>", "bye, you<|eot|>"]),
    "mistral": (templates.MISTRAL, "</s>", [" fine</s>", " bye, you</s>"]),
}


@pytest.mark.parametrize("style", STYLES)
def test_the_mask_covers_each_answer_and_its_end_token_only(style: str) -> None:
    template, eos, expected = STYLES[style]
    made = renderer(template, eos)
    messages = chat("how are you", "fine", "bye", "bye, you")
    (sequence,) = render(made, messages)
    assert answers(made, sequence) == expected
    # What is before each answer is what serving encodes.
    for turn in (1, 3):
        prompt = encode_chat(made.tokenizer, messages[:turn])
        assert sequence.tokens[: len(prompt)] == prompt
        assert not sequence.answer[len(prompt) - 1]
        assert sequence.answer[len(prompt)]
    # The sequence ends with the last end token: the line break after it is no part of what the target writes.
    assert sequence.tokens[-1] == made.tokenizer.eos_token_id
    assert sequence.answer[-1]


def test_it_agrees_with_the_templates_own_generation_marks() -> None:
    made = renderer(templates.CHATML)
    messages = chat("one", "two", "three", "four", system="be brief")
    marked = made.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    (sequence,) = render(made, messages)
    size = len(sequence.tokens)
    assert sequence.tokens == marked["input_ids"][:size]
    assert sequence.answer == [bool(value) for value in marked["assistant_masks"][:size]]
    assert not any(marked["assistant_masks"][size:])


def test_the_think_opener_of_the_generation_prompt_is_not_supervised() -> None:
    # Mistake 10: boilerplate that the template writes itself must not be taught.
    made = renderer(templates.THINK)
    (sequence,) = render(made, chat("hi", "<think>\nhm\n</think>\nhello"))
    assert answers(made, sequence) == ["hm\n</think>\nhello<|im_end|>"]
    prompt = encode_chat(made.tokenizer, chat("hi"))
    assert sequence.tokens[: len(prompt)] == prompt
    assert made.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n")


def test_rewritten_history_makes_each_turn_an_example_of_its_own() -> None:
    made = renderer(templates.THINK)
    messages = chat("hi", "<think>\nhm\n</think>\nhello", "bye", "<think>\nso\n</think>\nciao")
    first, second = render(made, messages)
    assert answers(made, first) == ["hm\n</think>\nhello<|im_end|>"]
    assert answers(made, second) == ["so\n</think>\nciao<|im_end|>"]
    assert "hm" not in text(made, second)  # as served: the template has dropped it
    assert second.tokens[: second.answer.index(True)] == encode_chat(made.tokenizer, messages[:3])


def test_a_template_that_never_shows_thinking_gives_the_prompt_as_served_and_the_whole_answer() -> None:
    made = renderer(templates.THINK_ALWAYS_DROPPED)
    (sequence,) = render(made, chat("hi", "<think>\nhm\n</think>\nhello"))
    prompt = encode_chat(made.tokenizer, chat("hi"))
    assert sequence.tokens[: sequence.answer.index(True)] == prompt
    assert answers(made, sequence) == ["hm\n</think>\nhello<|im_end|>"]
    # Without thinking in the data, and with an answer that begins like the opener.
    for content in ("hello", "<thanks>"):
        (sequence,) = render(made, chat("hi", content))
        assert sequence.tokens[: sequence.answer.index(True)] == prompt
        assert answers(made, sequence) == [f"{content}<|im_end|>"]


def test_a_moving_system_prompt_is_history_rewritten() -> None:
    made = renderer(templates.MOVING_SYSTEM, "</s>")
    messages = chat("a", "b", "c", "d", system="SYS")
    first, second = render(made, messages)
    assert text(made, first) == "<s>[INST]SYS a[/INST]b</s>"
    assert text(made, second) == "<s>[INST]a[/INST]b</s>[INST]SYS c[/INST]d</s>"
    assert answers(made, second) == ["d</s>"]
    # Without a system prompt nothing moves, and one sequence holds both answers.
    (whole,) = render(made, chat("a", "b", "c", "d"))
    assert answers(made, whole) == ["b</s>", "d</s>"]


def test_where_the_tokenizer_would_merge_across_the_boundary_the_prompt_stays_as_served() -> None:
    made = renderer(templates.PLAIN, "</s>", merges=(":x", "xy"))
    joint = made.encode(["Q:hiA:xy</s>"])[0]
    prompt = encode_chat(made.tokenizer, chat("hi"))
    assert joint[: len(prompt)] != prompt  # the case there is to test
    (sequence,) = render(made, chat("hi", "xy"))
    assert sequence.tokens[: len(prompt)] == prompt
    assert answers(made, sequence) == ["xy</s>"]
    assert sequence.tokens[len(prompt) :] == [made.tokenizer.convert_tokens_to_ids("xy"), made.tokenizer.eos_token_id]
    # In a later prompt the merge is history as served, so the earlier answer cannot share the sequence.
    first, second = render(made, chat("hi", "xy", "more", "z"))
    assert answers(made, first) == ["xy</s>"]
    assert answers(made, second) == ["z</s>"]
    assert second.tokens[: second.answer.index(True)] == encode_chat(made.tokenizer, chat("hi", "xy", "more"))


def test_an_end_of_sequence_inside_an_answer_ends_what_is_supervised() -> None:
    made = renderer(templates.CHATML)
    (sequence,) = render(made, chat("hi", "a<|im_end|>b"))
    assert answers(made, sequence) == ["a<|im_end|>"]


def test_a_turn_end_that_the_target_does_not_stop_at_is_kept_without_the_line_break() -> None:
    made = renderer(templates.CHATML, eos="</s>")
    (sequence,) = render(made, chat("hi", "a", "b", "c"))
    assert answers(made, sequence) == ["a<|im_end|>", "c<|im_end|>"]


def test_turns_that_answer_nothing_are_not_supervised() -> None:
    made = renderer(templates.CHATML)
    greeting = [{"role": "assistant", "content": "welcome"}, *chat("hi", "hello")]
    (sequence,) = render(made, greeting)
    assert answers(made, sequence) == ["hello<|im_end|>"]


def test_a_refusing_template_is_a_refusal() -> None:
    made = renderer(templates.MISTRAL, "</s>")
    with pytest.raises(PromptError, match="only user and assistant"):
        made.turn_texts(chat("hi", "hello", system="SYS"))


def test_other_templates_are_chosen_by_number() -> None:
    tokenizer = make_tokenizer(templates.CHATML)
    made = Renderer(tokenizer, [tokenizer.eos_token_id])
    made.templates.append(templates.LLAMA3)
    assert made.prompt_text(chat("hi"), 0) == "<s><|start|>user<|stop|>\n\nhi<|eot|><|start|>assistant<|stop|>\n\n"
    assert made.prompt_text(chat("hi")).startswith("<|im_start|>")


def test_plain_text_is_answer_after_its_first_token() -> None:
    made = renderer(templates.CHATML)
    (sequence,) = made.plain_texts(["abc"])
    assert sequence.tokens == made.tokenizer.encode("abc")
    assert sequence.answer == [False, True, True]
    assert sequence.cut(2).answer == [False, True]


def test_a_chain_breaks_where_ids_do_not_continue() -> None:
    one, two = ([1, 2], [3]), ([1, 2, 3, 4], [5, 6])
    (joined,) = chain([one, two])
    assert joined == Rendered(tokens=[1, 2, 3, 4, 5, 6], answer=[False, False, True, False, True, True])
    apart = chain([one, ([1, 2, 9, 4], [5])])
    assert [sequence.answer for sequence in apart] == [[False, False, True], [False] * 4 + [True]]
    assert chain([]) == []


_words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda words: not any(special in words for special in templates.SPECIALS)
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(STYLES)), st.lists(st.tuples(_words, _words), min_size=1, max_size=3))
def test_any_conversation_has_every_answer_supervised_once_after_its_prompt_as_served(
    style: str, turns: list[tuple[str, str]]
) -> None:
    template, eos, _ = STYLES[style]
    made = _CACHE.setdefault(style, renderer(template, eos))
    messages = chat(*(words for turn in turns for words in turn))
    sequences = render(made, messages)
    stop = made.tokenizer.eos_token_id
    ends = sum(t == stop and a for s in sequences for t, a in zip(s.tokens, s.answer, strict=True))
    assert ends == len(turns)
    joined = [answer for sequence in sequences for answer in answers(made, sequence)]
    for (_, said), answer in zip(turns, joined, strict=True):
        assert answer.removesuffix(eos).strip() == said.strip()


_CACHE: dict[str, Any] = {}
