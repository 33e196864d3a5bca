"""Incremental detokenization of updates, and stop strings. Used by the offline API and by the server's streams."""

from collections.abc import Collection, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from fledge.decoding.params import SamplingParams
from fledge.engine.outputs import CompletionOutput, RequestMetrics, RequestUpdate, TextPiece, TokenLogprobs

PROMPT_TAIL = 8  # tokens: enough for one character, which may consist of several


class Detokenizer:
    """The text of one answer, with the token of each character; cut at the first stop string.

    A stop string may be spread over several tokens and rounds, so `release` holds the last characters back until they
    cannot be the start of one. Without a tokenizer there are tokens and no text.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        params: SamplingParams,
        eos_ids: Collection[int] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        """`eos_ids`: the target's end-of-text ids. As in vLLM, the tokenizer's own is not reported as `stop_reason`;
        others, which may have a meaning (e.g. a tool call), are.

        `prompt`: keeps the space before the first word, which SentencePiece decoders remove at the start of a text.
        """
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.stop_string: str | None = None  # found in the text
        self.stop_reason: int | str | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.metrics: RequestMetrics | None = None
        self._params = params
        own = None if tokenizer is None else tokenizer.eos_token_id
        self._silent_ends = () if params.ignore_eos else eos_ids if own is None else (own,)
        self._backend = None if tokenizer is None else tokenizer.backend_tokenizer
        context = list(prompt[-PROMPT_TAIL:])
        if self._backend is None or self._backend.decode(context).endswith("\N{REPLACEMENT CHARACTER}"):
            context = []  # an incomplete character would be repeated when it is complete
        self._stream = DecodeStream(ids=context, skip_special_tokens=params.skip_special_tokens)
        self._stops = tuple(params.stop or ())
        self._held_back = max((len(stop) for stop in self._stops), default=1) - 1
        self._drafted: list[bool] = []  # for each token
        self._ends: list[int] = []  # length of the text after each token
        self._released = 0  # characters
        self._released_tokens = 0  # tokens whose text is released completely

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, update: RequestUpdate) -> bool:
        """Add an update. Returns True if it completes a stop string of a request that the engine has not ended.

        The caller must then abort the request with reason "stop" and add the update that this returns. Tokens after a
        stop string are dropped. As in vLLM, a stop id that ends the answer is one of its tokens but not in its text,
        unless `include_stop_str_in_output`.
        """
        found = False
        self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs
        if self.stop_string is None:
            hidden = update.stop_token_id is not None and not self._params.include_stop_str_in_output
            last = len(update.token_ids)
            for count, token in enumerate(update.token_ids, start=1):
                silent = hidden and count == last
                if found := self.push(token, drafted=count <= update.accepted, silent=silent):
                    break
            if update.logprobs is not None:
                self.logprobs += update.logprobs[: len(self.token_ids) - len(self.logprobs)]
        if update.finish_reason is not None:
            self.finish_reason = update.finish_reason if self.stop_string is None else "stop"
            self.error, self.metrics = update.error, update.metrics
            if self.stop_string is None and update.stop_token_id not in self._silent_ends:
                self.stop_reason = update.stop_token_id
        return found and update.finish_reason is None

    def push(self, token: int, *, drafted: bool = False, silent: bool = False) -> bool:
        """Add one token; a `silent` one adds no text. Returns True, and cuts the text, if a stop string is complete."""
        before = len(self.text)
        if self._backend is not None and not silent:
            self.text += self._stream.step(self._backend, token) or ""
        if len(self.token_ids) >= self._params.min_tokens:
            self._cut_at_stop_string(max(0, before - self._held_back))
        self.token_ids.append(token)
        self._drafted.append(drafted)
        self._ends.append(len(self.text))
        return self.stop_string is not None

    def release(self) -> tuple[TextPiece, ...]:
        """Return the new final text since the last call, token by token."""
        is_complete = self.is_finished or self.stop_string is not None
        certain = len(self.text) if is_complete else max(self._released, len(self.text) - self._held_back)
        pieces: list[TextPiece] = []
        start = self._ends[self._released_tokens - 1] if self._released_tokens else 0
        for index in range(self._released_tokens, len(self._ends)):
            end = self._ends[index]
            low, high = max(start, self._released), min(end, certain)
            if low < high:
                pieces.append(TextPiece(self.text[low:high], self._drafted[index]))
            if end <= certain:
                self._released_tokens = index + 1
            start = end
        self._released = certain
        return tuple(pieces)

    def offsets(self, first: int = 0) -> list[int]:
        """Return the start of each token's text, from token `first` on."""
        return [0, *self._ends][first : len(self._ends)]

    def token_texts(self) -> list[str]:
        """Return the text of each token. A character of several tokens belongs to the last; the others are empty."""
        return [self.text[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def completion(self, index: int = 0) -> CompletionOutput:
        """Return the answer; until it is finished, without the text that is held back."""
        certain = None if self.is_finished else max(0, len(self.text) - self._held_back)
        return CompletionOutput(
            index=index,
            text=self.text[:certain],
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self._params.logprobs is None else tuple(self.logprobs),
            rounds=() if self.metrics is None else self.metrics.rounds,
            error=self.error,
        )

    def _cut_at_stop_string(self, search_from: int) -> None:
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, search_from)) >= 0]
        if found:  # as in vLLM: the one that is complete first; of equals, the first in the list
            at, self.stop_string = min(found, key=lambda one: one[0] + len(one[1]))
            self.stop_reason = self.stop_string
            self.text = self.text[: at + (len(self.stop_string) if self._params.include_stop_str_in_output else 0)]
            self._ends = [min(end, len(self.text)) for end in self._ends]
