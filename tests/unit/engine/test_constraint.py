"""Constrained requests have the tokens of a plain masked loop, whatever is drafted, and nobody else notices them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor

from fledge import LLM, SamplingParams
from fledge.checkpoints.target import save_target
from fledge.decoding.sampling import SamplingRows, distribution
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.decoding.tree import DraftTree
from fledge.engine import adjustments
from fledge.engine.engine import LLMEngine
from fledge.engine.request import Request
from fledge.engine.sampler import masks_of
from fledge.errors import ConfigError
from tests.engine_cases import (
    EOS,
    TREE,
    VOCAB,
    Ask,
    add_request,
    answer_of,
    drafter,
    greedy,
    make_engine,
    next_logits,
    run,
    sampled,
)
from tests.grammar_cases import FORCED, GRAMMARS, LOOSE, NARROW, PAIRS, Automaton, Moves, plain
from tests.serving import make_llm
from tests.tiny_models import TINY_TARGET, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer


def submit(engine: LLMEngine, asks: Sequence[Ask], moves: Sequence[Moves | None]) -> list[Request]:
    return [
        add_request(
            engine,
            f"r{i}",
            ask.prompt,
            ask.params,
            seed=ask.seed,
            eos_ids=ask.eos_ids,
            constraint=None if one is None else Automaton(one),
        )
        for i, (ask, one) in enumerate(zip(asks, moves, strict=True))
    ]


def accepted_drafts(statistics: AcceptanceStatistics) -> int:
    return sum(statistics.accepted_by_depth)


def with_eos(ask: Ask) -> Ask:
    return replace(ask, eos_ids=(EOS,))


MIX: list[tuple[Ask, Moves | None]] = [
    (greedy((2, 3, 4, 5, 0, 2, 3), 14), PAIRS),
    (with_eos(greedy((2, 3, 4), 14)), PAIRS),
    (greedy((5, 5, 0), 12), None),
    (greedy((2, 3, 4, 5, 0), 14), NARROW),
    (sampled((4, 3), 12, seed=3), None),
    (sampled((2, 3, 4, 5), 14, seed=1), LOOSE),
    (with_eos(sampled((5,), 14, seed=2, top_k=3, top_p=0.9)), PAIRS),
    (greedy((1, 1), 14), FORCED),
    (sampled((3, 3, 3), 9, seed=8, temperature=1.5), NARROW),
    (greedy((4, 4), 9, logprobs=2), LOOSE),
]


@pytest.mark.parametrize("kind", ["none", "chain", "deep", "tree", "late", "graphs", "tight"])
def test_a_mixed_batch_has_the_tokens_of_plain_masked_loops(kind: str) -> None:
    """Both ways: constrained rows follow their grammar, and the others are as if they were alone."""
    settings: dict[str, object] = {
        "tree": {"tree": TREE},
        "deep": {"depth": 7},
        "late": {"read_late": True},
        "graphs": {"graphs": True, "read_late": True},
        "tight": {"num_blocks": 17, "max_num_batched_tokens": 5},  # preemptions, chunked prompts
    }.get(kind, {})  # type: ignore[assignment]
    drafts = None if kind == "none" else drafter()
    engine = make_engine(drafts=drafts, **({"depth": 0} if kind == "none" else {}), **settings)  # type: ignore[arg-type]
    requests = submit(engine, [ask for ask, _ in MIX], [moves for _, moves in MIX])
    run(engine)
    for request, (ask, moves) in zip(requests, MIX, strict=True):
        expected = answer_of(ask) if moves is None else plain(ask, moves)
        assert (request.output, request.finish_reason) == expected
    if kind == "tight":
        assert engine.scheduler.preemptions > 0
    if drafts is not None:  # the comparison means something: some drafts were refused, others stood
        automata = [request.constraint for request in requests if isinstance(request.constraint, Automaton)]
        assert sum(one.refused_drafts for one in automata) > 5
        assert sum(one.taken_drafts for one in automata) > 5
        assert sum(accepted_drafts(request.acceptance) for request in requests if request.constraint is not None) > 3


def test_others_go_on_while_a_grammar_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside it they have a round in every step, read one late, as a graph; it has one in every other."""
    monkeypatch.setattr("fledge.engine.programs.HostSampler", None)
    steps, asks = [], [greedy((2, 3, 4)[: 1 + i], 20) for i in range(3)]
    for moves in (None, PAIRS):
        engine = make_engine(drafts=drafter(), depth=0, read_late=True, graphs=True)
        requests = submit(engine, [greedy((5, 5), 8), *asks], [moves, None, None, None])
        constrained, others, rounds = requests[0], requests[1:], Counter[bool]()
        steps.append(0)
        while others[0].finish_reason is None:
            engine.step()
            steps[-1] += 1
            if engine._in_flight is not None and constrained.finish_reason is None:
                assert set(others) <= set(engine._in_flight.batch.requests)
                rounds[constrained in engine._in_flight.batch.decoding] += 1
        run(engine)
        assert constrained.output == (answer_of if moves is None else partial(plain, moves=PAIRS))(greedy((5, 5), 8))[0]
    assert steps[0] == steps[1]
    assert abs(rounds[True] - rounds[False]) <= 2, rounds


@pytest.mark.parametrize("name", ["eagle1", "reduced-vocabulary"])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_every_grammar_and_drafter(grammar: str, name: str) -> None:
    asks = [greedy((2, 3, 4, 5)[: 1 + i], 16) for i in range(4)] + [sampled((2, 5), 16, seed=9)]
    engine = make_engine(drafts=drafter(name))
    requests = submit(engine, asks, [GRAMMARS[grammar]] * len(asks))
    run(engine)
    for ask, request in zip(asks, requests, strict=True):
        assert (request.output, request.finish_reason) == plain(ask, GRAMMARS[grammar])


def exact(prompt: tuple[int, ...], moves: Moves, length: int, temperature: float) -> dict[tuple[int, ...], float]:
    """The distribution of the first `length` tokens under the masked target, by enumeration."""
    params = sampled(prompt, temperature=temperature).params
    rows = SamplingRows.from_params([params], [0], vocab_size=VOCAB)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, mass in found.items():
            constraint = Automaton(moves)
            constraint.accept(tokens)
            mask = constraint.allowed()
            assert mask is not None
            probs = distribution(next_logits((*prompt, *tokens)), rows, forbidden=~mask[None])[0].tolist()
            longer |= {(*tokens, token): mass * p for token, p in enumerate(probs) if p > 0}
        found = longer
    return found


@pytest.mark.parametrize("slots", [8, 192], ids=["the host masks", "the device masks"])
def test_sampled_drafts_are_judged_against_the_masked_distribution(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square over all answers of three tokens. Drawing a refused draft's correction from p itself fails it."""
    monkeypatch.setattr(adjustments, "SLOTS", slots)
    prompt, length, runs, batch = (2, 3, 4), 3, 1152, 192
    # Most tokens that the drafter likes are refused; what is left is split unevenly.
    moves: Moves = {0: {2: 1, 3: 1, 0: 1}, 1: {5: 2, 0: 2, 4: 2}, 2: {2: 3, 4: 3, 5: 3}, 3: {0: 3, 1: 3, 2: 3}}
    expected = exact(prompt, moves, length, temperature=1.0)
    seen: Counter[tuple[int, ...]] = Counter()
    engine = make_engine(drafts=drafter(), depth=2, sample_drafts=True, max_num_seqs=batch, num_blocks=2400)
    for first in range(0, runs, batch):
        asks = [sampled(prompt, length, seed=first + i, temperature=1.0) for i in range(batch)]
        requests = submit(engine, asks, [moves] * batch)
        while engine.has_unfinished:
            engine.step()
        assert any(request.slot is None for request in requests) == (slots < batch)
        seen.update(tuple(request.output) for request in requests)
    assert set(seen) <= set(expected), "an answer outside the grammar"
    usual = {answer: mass * runs for answer, mass in expected.items() if mass * runs >= 5}
    statistic = sum((seen[answer] - mean) ** 2 / mean for answer, mean in usual.items())
    freedom = len(usual) - 1
    assert freedom >= 5
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, f"chi-square {statistic:.1f} at {freedom} degrees of freedom"
    assert accepted_drafts(engine.stats().acceptance) > 50


def test_a_sampled_request_depends_on_its_seed_alone() -> None:
    ask = sampled((2, 3, 4), 10, seed=4, temperature=1.0)
    found = []
    for company in (0, 3):
        engine = make_engine(drafts=drafter(), sample_drafts=True)
        others = [sampled((5, 4), 12, seed=20 + i) for i in range(company)]
        requests = submit(engine, [ask, *others], [PAIRS, *[None] * company])
        run(engine)
        found.append(requests[0].output)
    assert found[0] == found[1]


@pytest.mark.parametrize("depth", [0, 4])
def test_a_complete_grammar_ends_the_answer_at_once(depth: int) -> None:
    """Even at the limit of tokens, and even if the end of text is to be ignored. What came after it is not taken."""
    for settings in ({"max_tokens": 10}, {"max_tokens": 30}, {"max_tokens": 30, "ignore_eos": True}):
        ask = with_eos(greedy((2, 3), **settings))  # type: ignore[arg-type]
        engine = make_engine(drafts=drafter(), depth=depth, max_depth=4)
        (request,) = submit(engine, [ask], [FORCED])
        run(engine)
        assert request.output == [next(iter(moves)) for moves in FORCED.values()]
        assert request.finish_reason == "stop"


def test_min_tokens_gives_way_where_the_grammar_has_only_an_end_left() -> None:
    short: Moves = {0: {4: 1}, 1: {EOS: 2}}
    held: Moves = {0: {4: 1}, 1: {EOS: 2, 4: 1}}
    engine = make_engine(drafts=drafter())
    asks = [with_eos(greedy((2, 3), 9, min_tokens=5))] * 2
    first, second = submit(engine, asks, [short, held])
    run(engine)
    assert first.output == [4, EOS]
    assert second.output[:5] == [4] * 5


class Broken(Automaton):
    """Fails after a number of calls of one method."""

    def __init__(self, method: str, after: int) -> None:
        super().__init__(LOOSE)
        self.method, self.left = method, after

    def _call(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("too complex")

    def masks(self, tokens: Sequence[int]) -> list[Tensor | None]:
        self._call("masks")
        return super().masks(tokens)

    def accept(self, tokens: Sequence[int]) -> None:
        self._call("accept")
        super().accept(tokens)


@pytest.mark.parametrize("method", ["masks", "accept"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_failing_constraint_ends_its_own_request_only(method: str, after: int) -> None:
    engine = make_engine(drafts=drafter())
    ask, other = greedy((2, 3, 4), 12), sampled((5, 0), 12, seed=6)
    failing = add_request(engine, "failing", ask.prompt, ask.params, constraint=Broken(method, after))
    (company,) = submit(engine, [other], [None])
    run(engine)
    assert failing.finish_reason == "error"
    assert failing.failure == "structured output: too complex"
    assert failing.output == plain(ask, LOOSE)[0][: failing.num_output]
    assert (company.output, company.finish_reason) == answer_of(other)
    assert engine.block_manager.used == 0


def test_masks_of_a_tree_follow_its_branches() -> None:
    """Node tokens 2 -> 5 -> 3, 2 -> 3, 5: the grammar refuses 3 after 2 and 5 at the root."""
    request = add_request(make_engine(), "r", (2,), greedy((2,)).params, constraint=Automaton(PAIRS))
    tree = DraftTree(
        tokens=torch.tensor([[2, 5, 5, 3, 3]]),
        parents=torch.tensor([[-1, -1, 0, 0, 2]]),
        depths=torch.tensor([[1, 1, 2, 2, 3]]),
        scores=torch.zeros(1, 5),
        max_depth=3,
    )
    (rows,) = masks_of([request], tree)
    assert rows is not None
    assert [None if row is None else row.nonzero().flatten().tolist() for row in rows] == [
        [2, 3, 4],
        [0, 1, 5],
        None,
        [2, 3, 4],
        None,
        [0, 1, 5],
    ]


def test_nothing_is_read_where_nobody_has_a_constraint() -> None:
    class Unreadable:
        def tolist(self) -> list[int]:
            raise AssertionError("the device was asked")

    request = add_request(make_engine(), "r", (2,), greedy((2,)).params)
    assert masks_of([request], Unreadable()) == [None]  # type: ignore[arg-type]


def test_factories_make_one_constraint_for_each_answer(tmp_path: Path) -> None:
    directory = tmp_path / "target"
    save_target(make_target(replace(TINY_TARGET, vocab_size=VOCAB_SIZE)), directory)
    save_tokenizer(directory)
    made: list[_Spelled] = []

    def factory(word: bytes) -> Callable[[], "_Spelled"]:
        def make() -> _Spelled:
            made.append(_Spelled(word))
            return made[-1]

        return make

    llm = LLM(directory, device="cpu", kv_cache_bytes=2**22)
    params = SamplingParams(temperature=1.0, n=2, max_tokens=20)
    outputs = llm.generate(["a", "b"], params, constraint=[factory(b"yes"), None])
    assert [answer.text for answer in outputs[0].outputs] == ["yes", "yes"]
    assert [answer.stop_reason for answer in outputs[0].outputs] == [None, None]
    assert outputs[1].outputs[0].text[:3] != "yes"
    assert len(made) == 2
    assert llm.generate("a", params, constraint=factory(b"no"))[0].outputs[1].text == "no"
    with pytest.raises(ConfigError, match="1 prompts but 2 constraints"):
        llm.generate("a", params, constraint=[None, None])


class _Spelled:
    """Spells one word in the byte-level tokenizer of the tests."""

    def __init__(self, word: bytes) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.left = [alphabet.index(chr(byte)) for byte in word]

    def allowed(self) -> Tensor | None:
        return self.masks(())[0]

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        return len(self.masks(tokens)) - 1

    def masks(self, tokens: Sequence[int]) -> list[Tensor | None]:
        valid = next((i for i, token in enumerate(tokens) if token != self.left[i]), len(tokens))
        masks: list[Tensor | None] = []
        for place in range(valid + 1):
            mask = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
            mask[self.left[place]] = True
            masks.append(mask)
        return masks

    def accept(self, tokens: Sequence[int]) -> None:
        del self.left[: len(tokens)]

    @property
    def is_complete(self) -> bool:
        return not self.left


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_and_allowed_tokens_are_kept_with_and_without_drafts(temperature: float) -> None:
    plain, drafting = make_llm(speculative=False), make_llm()
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
    free = plain.generate([[7, 3, 50]], params)[0].outputs[0].token_ids
    pair, single = (plain.tokenizer.decode(free[at : at + 2]) for at in (1, 9)), plain.tokenizer.decode(free[4:5])
    words = [word for word in (*pair, single) if "\ufffd" not in word] or [single]
    banned = [plain.tokenizer.encode(word) for word in words]
    for more in (
        {"bad_words": words},
        {"allowed_token_ids": [*range(20, 60)]},
        {"allowed_token_ids": [*range(20, 60)], "bad_words": words, "structured_outputs": {"regex": "[a-zA-Z]{40}"}},
    ):
        asked = replace(params, **more)
        found, alone = (llm.generate([[7, 3, 50]], asked)[0].outputs[0].token_ids for llm in (drafting, plain))
        assert found == alone
        assert len(found) == 24
        assert set(found) <= set(more.get("allowed_token_ids", range(VOCAB_SIZE)))
        if "bad_words" in more:
            assert not any(list(found[at : at + len(word)]) == word for word in banned for at in range(len(found)))
    (failed,) = plain.generate(
        [[7, 3, 50]], replace(params, allowed_token_ids=[20], bad_words=[plain.tokenizer.decode([20])])
    )
    assert "leave no token" in str(failed.outputs[0].error)
    for wrong in ({"allowed_token_ids": []}, {"allowed_token_ids": [-1]}, {"bad_words": [""]}, {"bad_words": 3}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            replace(params, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="allowed_token_ids: found 257"):
        plain.generate([[7]], replace(params, allowed_token_ids=[VOCAB_SIZE]))
