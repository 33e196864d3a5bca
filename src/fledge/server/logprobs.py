"""Log-probabilities in OpenAI's two shapes."""

import functools
import itertools
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
        self.of = functools.cache(self._look_up)

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        if self._as_ids or self._tokenizer is None:
            text = f"token_id:{token}"
            return text, list(text.encode())
        text = str(self._tokenizer.decode([token]))
        spelled = None
        if "\N{REPLACEMENT CHARACTER}" in text:  # part of a character: its bytes are in the vocabulary's spelling
            spelled = _bytes_of(str(self._tokenizer.convert_ids_to_tokens(token)))
        return text, spelled or list(text.encode())


def chat_logprobs(logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat answer."""
    return {
        "content": [
            _entry(one.token, one.logprob, texts) | {"top_logprobs": [_entry(*other, texts) for other in one.top]}
            for one in logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(logprobs: Sequence[TokenLogprobs], texts: TokenTexts, offset: int) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion; `offset` characters came before."""
    tokens = [texts.of(one.token)[0] for one in logprobs]
    return {
        "text_offset": list(itertools.accumulate(map(len, tokens), initial=offset))[:-1],
        "token_logprobs": [_finite(one.logprob) for one in logprobs],
        "tokens": tokens,
        "top_logprobs": [  # the chosen token is among them, as at OpenAI
            {texts.of(token)[0]: _finite(value) for token, value in ((one.token, one.logprob), *one.top)}
            for one in logprobs
        ],
    }


def _entry(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    text, spelled = texts.of(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": spelled}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST


# How byte-level vocabularies spell bytes: printable ones as themselves, the others from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


def _bytes_of(spelled: str) -> list[int] | None:
    if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):  # SentencePiece's byte fallback
        return [int(spelled[3:5], 16)]
    return [_ALPHABET[character] for character in spelled] if set(spelled) <= _ALPHABET.keys() else None
