"""One answer in the making: tokens from the engine become text, pieces to stream, and in the end an output."""

from fledge.engine.engine import Update
from fledge.engine.outputs import CompletionOutput, RequestMetrics, TextPiece
from fledge.engine.request import Request
from fledge.engine.text_stream import TextStream


class Answer:
    """Collects the updates of one request. `index` tells the answers to one prompt apart."""

    def __init__(self, request: Request, stream: TextStream | None, index: int = 0) -> None:
        self.request = request
        self.index = index
        self.token_ids: list[int] = []
        self.stopped_by_string = False
        self._stream = stream
        self._drafted: list[bool] = []  # for each token

    @property
    def is_finished(self) -> bool:
        return self.stopped_by_string or self.request.finish_reason is not None

    def take(self, update: Update) -> list[int]:
        """Add an update's tokens, up to the one that completes a stop string; return those added.

        As in vLLM, a stop id that ends the answer is one of its tokens but not of its text, unless that was asked for.
        """
        taken = update.tokens
        request, last = self.request, len(update.tokens)
        silent = request.finish_reason == "stop" and not request.params.include_stop_str_in_output
        if self._stream is not None:
            for count, token in enumerate(update.tokens, start=1):
                if self._stream.push(token, silent=silent and count == last and token in request.stop_ids):
                    self.stopped_by_string = True
                    taken = update.tokens[:count]
                    break
        self.token_ids += taken
        self._drafted += [i < update.accepted for i in range(len(taken))]
        return taken

    def release(self) -> tuple[TextPiece, ...]:
        """Return the text that has become certain."""
        if self._stream is None:
            return ()
        pieces = self._stream.release(finished=self.is_finished)
        return tuple(TextPiece(text=text, drafted=self._drafted[index]) for index, text in pieces)

    def completion(self, eos_ids: tuple[int, ...]) -> CompletionOutput:
        reason = "stop" if self.stopped_by_string else self.request.finish_reason
        stop_reason: int | str | None = self._stream.stop_string if self._stream is not None else None
        # As in vLLM, the target's own end of text is no reason. Nor is a constraint that is complete.
        if stop_reason is None and reason == "stop" and self.token_ids[-1] in self.request.stop_ids - set(eos_ids):
            stop_reason = self.token_ids[-1]
        logprobs = tuple(self.request.logprobs[: len(self.token_ids)])
        return CompletionOutput(
            index=self.index,
            text=self._stream.text if self._stream is not None else "",
            token_ids=tuple(self.token_ids),
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=logprobs if self.request.params.logprobs is not None else None,
            rounds=tuple(self.request.rounds),
        )

    def metrics(self) -> RequestMetrics:
        request = self.request
        assert request.finished_at is not None
        first = request.first_token_at or request.finished_at
        return RequestMetrics(
            acceptance=request.acceptance,
            cached_tokens=request.cached_tokens,
            preemptions=request.preemptions,
            time_to_first_token=first - request.arrived,
            seconds=request.finished_at - request.arrived,
        )
