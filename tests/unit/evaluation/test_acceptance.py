"""A target on which drafters are exchanged: what it answers, what it counts, and what it refuses to call its own."""

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge import LLM, SamplingParams
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RoundRecord
from fledge.errors import CheckpointError, PromptError
from fledge.evaluation.acceptance import (
    AcceptanceMeter,
    AcceptanceSettings,
    Measurement,
    TargetAnswers,
    first_difference,
    request_record,
)
from fledge.evaluation.dialogue import answer_seed
from fledge.evaluation.results import RequestRecord, answer_facts, token_share
from fledge.evaluation.workloads import Prompt, Workload, spread
from fledge.models.drafter.variants import EAGLE_3_1
from tests.tiny_models import TINY_TARGET, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

USER = {"role": "user", "content": "the cat"}
AND = {"role": "user", "content": "and"}


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("pair")
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,), max_positions=128)
    target = make_target(config)
    save_target(target, root / "target")
    save_tokenizer(root / "target")
    save_drafter(make_drafter(EAGLE_3_1.config_for(config), target), root / "full")
    return root


@pytest.fixture(name="meter", scope="module")
def _meter(pair: Path) -> Iterator[AcceptanceMeter]:
    meter = AcceptanceMeter(AcceptanceSettings(target=str(pair / "target"), max_tokens=6, device="cpu", seed=3))
    yield meter
    meter.close()


def workload(*prompts: Prompt) -> Workload:
    return Workload(name="mine", prompts=prompts, source="here", licence="mine")


def asked(number: int, *messages: dict[str, str]) -> Prompt:
    return Prompt(id=str(number), category="c", messages=messages)


def test_every_turn_is_answered_with_the_target_s_own_history(meter: AcceptanceMeter) -> None:
    other = {"role": "assistant", "content": "another model's"}
    ids = Prompt(id="ids", category="c", token_ids=(10, 11, 12))
    text = Prompt(id="text", category="c", text="once upon a time")
    found = meter.answer([workload(asked(0, USER), asked(1, USER, other, AND), ids, text)], 0.0)
    assert (found.too_long, found.cut_short) == ((), ())
    assert [turn.prompt for turn in found.turns] == ["0", "1", "1", "ids", "text"]
    turns = found.turns
    (again,) = meter.llm.generate([list(turns[1].prompt_token_ids)], SamplingParams(temperature=0.0, max_tokens=6))
    history = [USER, {"role": "assistant", "content": again.outputs[0].text}, AND]
    assert list(turns[2].prompt_token_ids) == meter.llm.encode_chat(history)
    assert turns[3].prompt_token_ids == (10, 11, 12)
    assert list(turns[4].prompt_token_ids) == meter.llm.tokenizer.encode("once upon a time")[:8]
    assert [turn.seed for turn in turns[1:3]] == [answer_seed(3, zlib.crc32(b"1"), 0, turn) for turn in range(2)]


def test_a_sampled_answer_does_not_follow_from_what_else_is_asked(meter: AcceptanceMeter) -> None:
    alone = meter.answer([workload(asked(1, USER))], 1.0)
    among = meter.answer([workload(asked(0, AND)), workload(asked(2, USER), asked(1, USER))], 1.0)
    assert [turn for turn in among.turns if turn.prompt == "1"] == list(alone.turns)
    assert among.turns[1].answer_token_ids != alone.turns[0].answer_token_ids  # asked the same, under another id


def test_prompts_that_do_not_fit_are_left_out_and_named(meter: AcceptanceMeter) -> None:
    long = {"role": "user", "content": "x" * 300}
    found = meter.answer([workload(asked(0, USER, long), asked(1, long))], 0.0)
    assert [turn.prompt for turn in found.turns] == ["0"]
    assert (found.too_long, found.cut_short) == ((("mine", "1"),), (("mine", "0"),))


def test_drafters_are_exchanged_and_count_what_the_engine_counts(meter: AcceptanceMeter, pair: Path) -> None:
    found = meter.answer([workload(asked(0, USER), asked(1, AND))], 0.0)
    for depth in (1, 3):
        meter.set_drafter(pair / "full", depth)
        measured = meter.measure(found.turns, 0.0)
        assert measured.different == ()
        assert measured.failure is None
        assert measured.tokens == sum(len(turn.answer_token_ids) for turn in found.turns)
        llm = LLM(
            pair / "target",
            speculative_config={"model": str(pair / "full"), "num_speculative_tokens": depth, "adaptive": False},
            device="cpu",
        )
        outputs = llm.chat([[USER], [AND]], SamplingParams(temperature=0.0, max_tokens=6))
        assert measured.total == AcceptanceStatistics.merge(output.metrics.acceptance for output in outputs)
        assert measured.grouped(["a", "b"])["b"] == outputs[1].metrics.acceptance


def test_a_drafter_that_cannot_be_used_is_refused_and_the_next_one_works(meter: AcceptanceMeter, pair: Path) -> None:
    found = meter.answer([workload(asked(0, USER))], 0.0)
    with pytest.raises(CheckpointError):
        meter.set_drafter(pair / "target", 2)
    meter.set_drafter(pair / "full", 2)
    assert meter.measure(found.turns, 0.0).total.depth == 2


def test_differences_are_found_and_judged(meter: AcceptanceMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    found = meter.answer([workload(asked(0, USER), asked(1, AND))], 0.0)
    own = found.turns[1].answer_token_ids
    wrong = replace(found.turns[1], answer_token_ids=(*own[:2], (own[2] + 1) % VOCAB_SIZE))
    turns = (found.turns[0], wrong)
    measured = meter.measure(turns, 0.0)
    assert measured.different == ((1, 2),)
    assert meter.clear_differences(turns, measured.different, 0.0) == {1}
    monkeypatch.setattr("fledge.evaluation.acceptance.TIE", 1e9)
    assert meter.clear_differences(turns, measured.different, 0.0) == set()


def test_a_target_without_a_chat_template_says_so(pair: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for path in (pair / "target").iterdir():
        if not path.name.startswith("token"):
            (target / path.name).write_bytes(path.read_bytes())
    meter = AcceptanceMeter(AcceptanceSettings(target=str(target), device="cpu"))
    with pytest.raises(PromptError, match="tokenizer"):
        meter.answer([workload(asked(0, USER))], 0.0)


def test_measurements_and_answers_survive_json(meter: AcceptanceMeter) -> None:
    request = RequestRecord(prompt="p", sent=0.0, output_tokens=7, acceptance=((3, 2, 4), (3, 0, 1)))
    measured = Measurement(requests=(request, request), different=((2, 5),), seconds=1.5)
    assert Measurement.from_dict(measured.to_dict()) == measured
    assert measured.total.rounds == 10
    assert measured.grouped(["a", "b"])["a"].acceptance_length == 1 + 8 / 5
    found = meter.answer([workload(asked(0, USER))], 0.7)
    assert TargetAnswers.from_dict(found.to_dict()) == found


def test_a_miss_counts_where_its_right_token_is_known(pair: Path) -> None:
    llm = LLM(
        pair / "target",
        speculative_config={"model": str(pair / "full"), "num_speculative_tokens": 3, "adaptive": False},
        device="cpu",
    )
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=9))
    rounds = output.outputs[0].rounds
    tokens = (1, 2, 3, *output.outputs[0].token_ids)
    right = [tokens[r.start + r.accepted] for r in rounds if r.accepted < r.drafted and r.start + r.accepted < 12]
    in_draft = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    in_draft[right[0]] = False
    record = request_record("p", output, in_draft)
    assert record.missed == len(right)
    assert record.missed_outside == right.count(right[0])
    assert request_record("p", output, None).missed_outside == 0


def test_a_request_tells_of_its_rounds_outside_repetition() -> None:
    tokens = [*range(8)] * 3  # all but the first eight are repeated
    rounds = [RoundRecord(5 + 1, 3, 1), RoundRecord(5 + 7, 3, 2), RoundRecord(5 + 8, 3, 3)]
    every = AcceptanceStatistics()
    every.count((one.drafted, one.accepted) for one in rounds)
    facts = answer_facts(tokens, prompt=[90] * 5, acceptance=every, rounds=rounds)
    record = RequestRecord(prompt="p", sent=0.0, **facts)
    assert record.acceptance == ((3, 1, 1), (3, 2, 1), (3, 3, 1))
    assert record.fresh_acceptance == record.novel_acceptance == ((3, 1, 1), (3, 2, 1))
    assert (token_share([record], "repeated_tokens"), token_share([record], "copied_tokens")) == (16 / 24, 0.0)
    assert token_share([replace(record, repeated_tokens=None)], "repeated_tokens") is None
    measured = Measurement(requests=(record,), different=(), seconds=1.0)
    assert (measured.total.acceptance_length, measured.statistics("fresh").acceptance_length) == (3.0, 2.5)


def test_a_request_tells_of_its_rounds_outside_copies_of_the_prompt() -> None:
    prompt, tokens = list(range(20)), [50, *range(4, 13), 51, 52]  # nine tokens are copied, none is repeated
    rounds = [RoundRecord(20 + 1, 3, 3), RoundRecord(20 + 9, 3, 2), RoundRecord(20 + 10, 3, 0)]
    every = AcceptanceStatistics()
    every.count((one.drafted, one.accepted) for one in rounds)
    record = RequestRecord(prompt="p", sent=0.0, **answer_facts(tokens, prompt=prompt, acceptance=every, rounds=rounds))
    assert (record.prompt_tokens, record.copied_tokens, record.repeated_tokens) == (20, 9, 0)
    assert record.fresh_acceptance == record.acceptance == ((3, 0, 1), (3, 2, 1), (3, 3, 1))
    assert record.novel_acceptance == ((3, 0, 1),)
    assert [len(record.tally(rounds)) for rounds in ("all", "fresh", "novel")] == [3, 3, 1]
    assert RequestRecord.from_dict(record.to_dict(), "record") == record


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_prompts_are_taken_evenly() -> None:
    assert spread(list(range(10)), 4) == [0, 2, 5, 7]
    assert spread([1, 2], 4) == [1, 2]
