from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fledge.decoding.params import SamplingParams
from fledge.engine.detokenizer import Detokenizer
from fledge.engine.outputs import RequestUpdate, TextPiece
from fledge.server.completions import token_texts
from tests.tiny_tokenizer import END, save_tokenizer


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer(tmp_path_factory: pytest.TempPathFactory):
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


def feed(tokenizer, text: str, params: SamplingParams) -> tuple[Detokenizer, list[str], int]:
    """Push the text's tokens one by one; return the stream, what was released after each, and the tokens taken."""
    stream = Detokenizer(tokenizer, params)
    released = []
    tokens = tokenizer.encode(text)
    for count, token in enumerate(tokens, start=1):
        finish_reason = "length" if count == len(tokens) else None
        stopped = stream.add(RequestUpdate("r", [token], finish_reason=finish_reason))
        released.append("".join(piece.text for piece in stream.release()))
        if stopped:
            return stream, released, count
    return stream, released, len(tokens)


def test_characters_of_several_tokens_come_out_whole(tokenizer) -> None:
    stream, released, _ = feed(tokenizer, "naïve 東京 🐦!", SamplingParams())
    assert stream.text == "naïve 東京 🐦!" == "".join(released)
    assert "\ufffd" not in "".join(released)


def test_a_stop_string_in_pieces_is_never_shown(tokenizer) -> None:
    stream, released, count = feed(tokenizer, "one STOP two", SamplingParams(stop=["STOP"]))
    assert stream.text == "one " == "".join(released)
    assert stream.stop_string == "STOP"
    assert count == len("one STOP"), "tokens end with the one that completes the stop string"


def test_the_beginning_of_a_stop_string_is_shown_once_it_cannot_become_one(tokenizer) -> None:
    stream, released, _ = feed(tokenizer, "a STORY", SamplingParams(stop=["STOP"]))
    assert stream.stop_string is None
    assert "".join(released) == "a STORY"
    assert "".join(released[:5]) == "a ", "after 'a STO' the last three characters are still held back"


def test_the_earliest_of_several_stop_strings_wins_and_can_be_kept(tokenizer) -> None:
    stream, _, _ = feed(tokenizer, "x, y. z", SamplingParams(stop=[". z", ", y"], include_stop_str_in_output=True))
    assert (stream.text, stream.stop_string) == ("x, y", ", y")


def test_of_stop_strings_that_end_together_the_first_named_wins() -> None:
    """All in one token, as vLLM has it: the earliest end, then the order of the list."""
    tokenizer = sentencepiece()
    (token,) = [tokenizer.convert_tokens_to_ids("▁world")]
    for stops, text in ((["b", "or"], " w"), (["ld", "rld", "l"], " wor"), (["rl", "l"], " wo"), (["l", "rl"], " wor")):
        stream = Detokenizer(tokenizer, SamplingParams(stop=stops), prompt=[token])
        stream.push(token)
        assert stream.text == text, stops


def sentencepiece() -> PreTrainedTokenizerFast:
    """A vocabulary in SentencePiece's spelling, with Llama 2's decoder."""
    words = ["<unk>", "▁Hello", "▁world", "!", "▁", "<0xC3>", "<0xA9>", "</s>"]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>")
    made = Tokenizer(model)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def test_with_sentencepiece_words_keep_their_blanks() -> None:
    tokenizer = sentencepiece()
    hello, world, mark, blank, *bits, end = range(1, 8)
    for prompt, text in (
        ([], "world! Hello é world"),
        ([hello], " world! Hello é world"),
        ([hello, bits[0]], "world! Hello é world"),
    ):
        stream = Detokenizer(tokenizer, SamplingParams(), prompt=prompt)
        for token in (world, mark, hello, blank, *bits, end, world):
            stream.push(token)
        assert stream.text == text
        assert stream.offsets(3)[:3] == [stream.text.index(" é"), *[stream.text.index("é")] * 2]
    texts = token_texts(tokenizer)
    assert [texts(one) for one in (hello, mark, blank, bits[0], end)] == [
        (" Hello", list(b" Hello")),
        ("!", [33]),
        (" ", [32]),
        ("\ufffd", [0xC3]),
        ("</s>", list(b"</s>")),
    ]


def test_stop_strings_wait_for_min_tokens(tokenizer) -> None:
    stream, _, count = feed(tokenizer, "a.b.c.d", SamplingParams(stop=["."], min_tokens=4, max_tokens=9))
    assert (stream.text, count) == ("a.b.c", 6)


def test_special_tokens_are_skipped_on_request(tokenizer) -> None:
    assert feed(tokenizer, f"a{END}b", SamplingParams())[0].text == "ab"
    assert feed(tokenizer, f"a{END}b", SamplingParams(skip_special_tokens=False))[0].text == f"a{END}b"


def test_release_says_which_token_each_piece_came_from(tokenizer) -> None:
    stream = Detokenizer(tokenizer, SamplingParams())
    tokens = tokenizer.encode("añb")
    assert not stream.add(RequestUpdate("r", tokens, drafted=3, accepted=3))
    assert stream.release() == (TextPiece("a", True), TextPiece("ñ", True), TextPiece("b", False))
    assert stream.token_texts() == ["a", "", "ñ", "b"]


def test_a_stop_string_ends_the_answer_whatever_the_engine_says_later(tokenizer) -> None:
    stream = Detokenizer(tokenizer, SamplingParams(stop=["."]))
    assert stream.add(RequestUpdate("r", tokenizer.encode("a.b")))
    assert not stream.is_finished
    assert not stream.add(RequestUpdate("r", tokenizer.encode("c."), finish_reason="length"))
    assert (stream.text, stream.finish_reason, stream.stop_reason) == ("a", "stop", ".")
    assert stream.token_ids == tokenizer.encode("a.")


@pytest.mark.parametrize(("kept", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_id_is_a_token_of_the_answer_and_not_of_its_text(tokenizer, kept: bool, text: str) -> None:
    tokens = tokenizer.encode("abc")
    end = tokens[-1]
    cases = ((None, False, None), (end, False, None), (end, True, end), (tokens[0], False, end))
    for own_end, ignored, reason in cases:
        params = SamplingParams(include_stop_str_in_output=kept, ignore_eos=ignored)
        ending = SimpleNamespace(backend_tokenizer=tokenizer.backend_tokenizer, eos_token_id=own_end)
        stream = Detokenizer(ending, params, eos_ids=(end,))
        stream.add(RequestUpdate("r", tokens, finish_reason="stop", stop_token_id=end))
        assert (stream.text, stream.token_ids, stream.stop_reason) == (text, tokens, reason)


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    stream = Detokenizer(None, SamplingParams())
    stream.add(RequestUpdate("r", [1, 2], finish_reason="length"))
    assert (stream.text, stream.token_ids, stream.release(), stream.finish_reason) == ("", [1, 2], (), "length")
