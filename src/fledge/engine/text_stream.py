"""Tokens to text as they come, and the stop strings found in it."""

from typing import Any

from tokenizers.decoders import DecodeStream

from fledge.decoding.params import SamplingParams


class TextStream:
    """The text of one answer. Knows which token each character came from, and cuts at a stop string.

    A stop string may arrive in pieces over several tokens and rounds, so the last characters are held back from
    `release` until they can no longer be the beginning of one.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.text = ""
        self.stop_string: str | None = None
        self._ends: list[int] = []  # length of the text after each token
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=params.skip_special_tokens)
        self._params = params
        self._stops = tuple(params.stop or ())
        self._held_back = max((len(stop) for stop in self._stops), default=1) - 1
        self._released = 0
        self._released_tokens = 0  # those that have nothing left to release

    def push(self, token: int, *, silent: bool = False) -> bool:
        """Add one token; return True if a stop string is complete, in which case the text is cut there.

        A `silent` token adds no text.
        """
        before = len(self.text)
        if not silent:
            self.text += self._stream.step(self._backend, token) or ""
        if len(self._ends) >= self._params.min_tokens:
            self._cut_at_stop_string(max(0, before - self._held_back))
        self._ends.append(len(self.text))
        return self.stop_string is not None

    def release(self, *, finished: bool) -> list[tuple[int, str]]:
        """Return the text that has become certain since the last call, as (token index, characters) pairs."""
        certain = len(self.text) if finished else max(self._released, len(self.text) - self._held_back)
        pieces: list[tuple[int, str]] = []
        start = self._ends[self._released_tokens - 1] if self._released_tokens else 0
        for index in range(self._released_tokens, len(self._ends)):
            end = self._ends[index]
            low, high = max(start, self._released), min(end, certain)
            if low < high:
                pieces.append((index, self.text[low:high]))
            if end <= certain:
                self._released_tokens = index + 1
            start = end
        self._released = certain
        return pieces

    def _cut_at_stop_string(self, search_from: int) -> None:
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, search_from)) >= 0]
        if found:
            at, self.stop_string = min(found)
            self.text = self.text[: at + (len(self.stop_string) if self._params.include_stop_str_in_output else 0)]
            self._ends = [min(end, len(self.text)) for end in self._ends]
