"""The dialogue loop: whose answers are history, what is dropped and why, and that a batch changes nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from fledge import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fledge.errors import PromptError
from fledge.evaluation.conversations import Message, split_turns
from fledge.evaluation.dialogue import REFUSED, TOO_LONG, Dialogue, answer_dialogues, answer_seed

METRICS = RequestMetrics(
    acceptance=AcceptanceStatistics(), cached_tokens=0, preemptions=0, time_to_first_token=0.0, seconds=0.0
)
PARAMS = SamplingParams(temperature=1.0, max_tokens=3, seed=5)


@dataclass
class FakeEngine:
    """A token is a character; the answer to a prompt is `<`, its length, `>`."""

    max_model_len: int = 40
    calls: list[list[str]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        text = "".join(message["content"] for message in messages)
        if "?!" in text:
            raise PromptError("the chat template refuses it")
        return [ord(character) for character in text]

    def generate(
        self,
        prompts: list[list[int]],
        sampling_params: list[SamplingParams],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        self.calls.append(["".join(map(chr, ids)) for ids in prompts])
        self.params += sampling_params
        if progress is not None:
            for done in range(1, len(prompts) + 1):
                progress(done, len(prompts))
        return [self._answer(ids, params) for ids, params in zip(prompts, sampling_params, strict=True)]

    def _answer(self, ids: list[int], params: SamplingParams) -> RequestOutput:
        text = f"<{len(ids)}>"[: params.max_tokens]
        answer = CompletionOutput(
            index=0, text=text, token_ids=tuple(map(ord, text)), finish_reason="length", stop_reason=None
        )
        return RequestOutput(
            request_id="0", prompt=None, prompt_token_ids=tuple(ids), outputs=(answer,), metrics=METRICS
        )


def said(*texts: str, role: str = "user") -> list[Message]:
    return [{"role": role, "content": text} for text in texts]


def dialogue(number: int, *texts: str) -> Dialogue:
    return Dialogue(number=number, turns=split_turns(said(*texts)))


def test_own_answers_are_the_history_and_all_dialogues_go_together() -> None:
    engine, done = FakeEngine(), []
    several = [dialogue(0, "one", "two"), dialogue(1, "a")]
    answer_dialogues(engine, several, PARAMS, advance=done.append)
    assert engine.calls == [["one", "a"], ["one<3>two"]]
    assert [message["content"] for message in several[0].history] == ["one", "<3>", "two", "<9>"]
    first, second = several[0].answers
    assert (first.prompt_token_ids, first.answer_token_ids) == (tuple(map(ord, "one")), tuple(map(ord, "<3>")))
    assert second.finish_reason == "length"
    assert sum(done) == 3
    assert not any(one.is_open or one.dropped for one in several)


def test_seeds_follow_from_what_is_asked_and_not_from_the_batch() -> None:
    alone, together = dialogue(7, "x", "y"), dialogue(7, "x", "y")
    answer_dialogues(FakeEngine(), [alone], PARAMS)
    answer_dialogues(FakeEngine(), [dialogue(1, "other"), together, dialogue(2, "z", "z", "z")], PARAMS)
    assert [turn.seed for turn in alone.answers] == [answer_seed(5, 7, 0, 0), answer_seed(5, 7, 0, 1)]
    assert alone.answers == together.answers
    engine = FakeEngine()
    again = Dialogue(number=7, sample=1, turns=alone.turns)
    answer_dialogues(engine, [again], PARAMS)
    assert {turn.seed for turn in again.answers}.isdisjoint(turn.seed for turn in alone.answers)
    assert [params.seed for params in engine.params] == [turn.seed for turn in again.answers]


def test_what_does_not_fit_or_is_refused_is_dropped_with_the_reason() -> None:
    engine, done = FakeEngine(max_model_len=12), []
    several = [dialogue(0, "x" * 11), dialogue(1, "x" * 9, "yyy", "z"), dialogue(2, "fine", "?!"), dialogue(3, "ok")]
    answer_dialogues(engine, several, PARAMS, least_room=2, advance=done.append)
    assert [one.dropped for one in several] == [TOO_LONG, TOO_LONG, REFUSED, None]
    assert [len(one.answers) for one in several] == [0, 1, 1, 1]
    assert engine.params[0].max_tokens == 3
    assert sum(done) == sum(len(one.turns) for one in several)


def test_an_answer_ends_where_the_room_does() -> None:
    engine = FakeEngine()
    short = dialogue(0, "x" * 8)
    answer_dialogues(engine, [short], PARAMS, longest=10)
    assert len(short.answers[0].answer_token_ids) == 2
    answer_dialogues(engine, [dialogue(0, "x" * 8)], SamplingParams(max_tokens=None), longest=99)
    assert [params.max_tokens for params in engine.params] == [2, 40 - 8]


def test_known_ids_and_a_renderer_of_ones_own() -> None:
    engine = FakeEngine()
    known = Dialogue(number=0, turns=[(), *split_turns(said("b"))], first_ids=[65, 66])
    answer_dialogues(engine, [known], PARAMS, encode=lambda one: engine.encode_chat(said("#", *_texts(one))))
    assert engine.calls == [["AB"], ["#<2>b"]]


def _texts(one: Dialogue) -> list[str]:
    return [message["content"] for message in one.next_messages]


def test_nothing_to_answer_asks_nothing() -> None:
    engine = FakeEngine()
    answer_dialogues(engine, [Dialogue(number=0, turns=[])], PARAMS)
    assert engine.calls == []


@pytest.mark.parametrize(
    ("roles", "dropping", "keeping"),
    [
        ("u", ["0"], ["0"]),
        ("uu", ["0", "1"], ["0", "1"]),
        ("suau", ["01", "3"], ["0123"]),
        ("suuau", ["01", "2", "4"], ["01", "234"]),
        ("uatu", ["0", "3"], ["012", "3"]),
        ("uata", ["0"], []),
        ("usu", ["0", "12"], ["0", "12"]),
        ("a", [], []),
    ],
)
def test_turns_that_wait_for_an_answer(roles: str, dropping: list[str], keeping: list[str]) -> None:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    messages = [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]
    for keep, expected in ((False, dropping), (True, keeping)):
        found = split_turns(messages, keep_answers=keep)
        assert ["".join(message["content"] for message in turn) for turn in found] == expected
