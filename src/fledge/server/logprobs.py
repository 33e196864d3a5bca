"""Log-probabilities in OpenAI's two shapes."""

import math
from collections.abc import Sequence
from typing import Any

from fledge.engine.outputs import TokenLogprobs

LOWEST = -9999.0  # stands in for minus infinity, which JSON does not have


class TokenTexts:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: Any | None, *, as_ids: bool = False) -> None:
        """`as_ids`: tokens are written "token_id:123"."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token: int) -> tuple[str, list[int]]:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}", list(f"token_id:{token}".encode())
        text = str(self._tokenizer.decode([token]))
        if "\N{REPLACEMENT CHARACTER}" in text:  # part of a character: its bytes are in the vocabulary's spelling
            spelled = str(self._tokenizer.convert_ids_to_tokens(token))
            return text, _bytes_of(spelled) or list(text.encode())
        return text, list(text.encode())


def chat_logprobs(logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat answer."""
    return {
        "content": [
            {
                **_entry(one.token, one.logprob, texts),
                "top_logprobs": [_entry(token, value, texts) for token, value in one.top],
            }
            for one in logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(logprobs: Sequence[TokenLogprobs], texts: TokenTexts, offset: int) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion; `offset` characters came before."""
    tokens = [texts.of(one.token)[0] for one in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    top = []
    for one, token in zip(logprobs, tokens, strict=True):
        likeliest = {token: _finite(one.logprob)}  # the chosen token is among them, as at OpenAI
        likeliest |= {texts.of(other)[0]: _finite(value) for other, value in one.top}
        top.append(likeliest)
    return {
        "text_offset": offsets,
        "token_logprobs": [_finite(one.logprob) for one in logprobs],
        "tokens": tokens,
        "top_logprobs": top,
    }


def _entry(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    text, spelled = texts.of(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": spelled}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST


def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _bytes_of(spelled: str) -> list[int] | None:
    if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):  # SentencePiece's byte fallback
        return [int(spelled[3:5], 16)]
    found = [_ALPHABET.get(character) for character in spelled]
    return None if None in found else [byte for byte in found if byte is not None]
