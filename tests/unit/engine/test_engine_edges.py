"""The corners: where answers end, what is too small or too long, who leaves when, and what is counted and reported."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge import LLM, SamplingParams
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.decoding.reference import Speculation
from fledge.engine.adjustments import SLOTS
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.engine.logprobs import FEW
from fledge.engine.outputs import TokenLogprobs
from fledge.engine.request import Phase
from fledge.errors import ConfigError, PromptError
from fledge.layers.dense_cache import DenseCache
from fledge.layers.linear import RMSNorm
from fledge.models.drafter.variants import EAGLE_3_1
from tests.engine_cases import (
    MAX_LENGTH,
    TARGET,
    TREE,
    Ask,
    add_request,
    answer_of,
    answers,
    drafter,
    greedy,
    make_engine,
    rounds_of,
    run,
    run_checking_drafts,
    sampled,
    speculation,
    target,
)
from tests.tiny_models import TINY_TARGET, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from tests.toy_models import ToyDrafter, ToyTarget

TEXT = (2, 3, 4, 5, 0, 2, 3, 4, 5, 0, 2, 3, 3, 0, 5, 4)
BOTH = pytest.mark.parametrize("read_late", [False, True], ids=["at once", "late"])

COUNTING = 9.0 * torch.eye(7).roll(1, dims=1)  # after token i comes i + 1, round the clock


class _CountingTarget(ToyTarget):
    """The engine sizes its cache by a weight of the model's layers, and toys have none."""

    def __init__(self) -> None:
        super().__init__(COUNTING)
        self.layers.append(RMSNorm(1, 1e-6))


class _CountingDrafter(ToyDrafter):
    def __init__(self) -> None:
        super().__init__(COUNTING)
        self.layers = torch.nn.ModuleList([RMSNorm(1, 1e-6)])


def counting_engine(**settings: object) -> LLMEngine:
    """Every draft stands, so a test can say what each round emits."""
    values = {"max_model_len": 64, "max_num_seqs": 2, "num_blocks": 40, "block_size": 4, **settings}
    config = EngineConfig(speculative_config=speculation(5), **values)  # type: ignore[arg-type]
    return LLMEngine(_CountingTarget(), _CountingDrafter(), config)


@BOTH
@pytest.mark.parametrize("by", ["max_tokens", "eos", "stop id", "length"])
def test_an_answer_ends_inside_its_accepted_drafts(by: str, read_late: bool) -> None:
    engine = counting_engine(read_late=read_late)
    prompt = [0] * 60 if by == "length" else [0]
    settings = {"max_tokens": 4} if by == "max_tokens" else {"max_tokens": 20}
    stops = [4] if by == "stop id" else []
    params = SamplingParams.from_dict({"temperature": 0, "stop_token_ids": stops, **settings})
    request = add_request(engine, "a", prompt, params, eos_ids=[4] if by == "eos" else [])
    other = add_request(engine, "b", [3], SamplingParams(temperature=0, max_tokens=17))
    run(engine)
    assert request.output == [1, 2, 3, 4]
    assert request.finish_reason == ("length" if by in ("max_tokens", "length") else "stop")
    # What verification found counts, trimmed or not; near the end of the length only two drafts had room.
    assert request.acceptance.tally == {(2 if by == "length" else 5, 2 if by == "length" else 5): 1}
    assert other.output == [(4 + i) % 7 for i in range(17)]


@BOTH
def test_the_smallest_requests(read_late: bool) -> None:
    engine = make_engine(drafts=drafter(), read_late=read_late)
    asks = [greedy([3], 1), greedy([3], 2), greedy([5], 7), sampled([0], 1, seed=3)]
    assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]


@BOTH
def test_the_models_length_is_reached_and_not_passed(read_late: bool) -> None:
    for limit in range(12, 22):
        params = SamplingParams(temperature=0, max_tokens=100 if limit % 2 else None, ignore_eos=True)
        for tree in (None, TREE):
            engine = make_engine(drafts=drafter(), max_model_len=limit, read_late=read_late, tree=tree)
            ask = Ask(prompt=TEXT[:10], params=params)
            request = ask.submit(engine, "a")
            run(engine)
            assert len(request.tokens) == limit
            assert (request.output, request.finish_reason) == answer_of(ask, max_length=limit)
            if tree is None:
                rounds = rounds_of(ask, Speculation(drafter=drafter(), depth=3), limit)
                drafted = sorted(done.drafted for done in rounds if done.drafted)
                assert sorted(d for (d, _), n in request.acceptance.tally.items() for _ in range(n)) == drafted


def test_a_drafter_with_fewer_positions_than_the_text_steps_aside() -> None:
    short = drafter("eagle3.1", 14)
    for prompt in (TEXT[:3], TEXT[:11], TEXT[:12], TEXT[:13], TEXT[:16]):
        engine = make_engine(drafts=short)
        ask = greedy(prompt, 13)
        request = ask.submit(engine, "a")
        run(engine)
        rounds = rounds_of(ask, Speculation(drafter=short, depth=3))
        assert request.output == answer_of(ask)[0]
        assert request.acceptance.rounds == sum(done.drafted > 0 for done in rounds)
        depths = iter([0, 0, 3, 3, 0] * 20)
        engine = make_engine(drafts=short, depth=lambda _, depths=depths: next(depths))  # type: ignore[misc]
        assert answers(engine, [ask]) == [request.output]


@BOTH
def test_a_prompt_longer_than_the_budget_is_read_in_parts_while_others_decode(read_late: bool) -> None:
    engine = make_engine(drafts=drafter(), max_num_batched_tokens=5, read_late=read_late)
    asks = [greedy([2, 3], 14), greedy(TEXT * 2, 10)]
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(asks)]
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
        if requests[1].phase is Phase.PREFILL and requests[1].settled > 5:
            assert requests[0].num_output > 1, "the long prompt holds up the others"
    assert [request.output for request in requests] == [answer_of(ask)[0] for ask in asks]


def test_what_can_never_run_is_refused_and_leaves_no_trace() -> None:
    engine = make_engine(drafts=drafter(), num_blocks=10)  # 36 tokens, 12 of them lookahead
    with pytest.raises(PromptError, match="may need 30 tokens of KV cache, which has room for 24"):
        engine.add_request("a", [1] * 10, SamplingParams(max_tokens=20))
    with pytest.raises(PromptError, match="may need 64 tokens"):
        engine.add_request("a", [1] * 10, SamplingParams(max_tokens=2000))
    with pytest.raises(PromptError, match="prompt is empty"):
        engine.add_request("a", [], SamplingParams())
    with pytest.raises(PromptError, match="the prompt has 64 tokens, but prompt and answer together may have 64"):
        engine.add_request("a", [1] * MAX_LENGTH, SamplingParams(max_tokens=1))
    for token in (-1, 6):
        with pytest.raises(PromptError, match=f"token id {token} is outside the vocabulary"):
            engine.add_request("a", [1, token], SamplingParams(max_tokens=1))
    with pytest.raises(ConfigError, match="logit_bias token id: found 6"):
        engine.add_request("a", [1], SamplingParams(max_tokens=1, logit_bias={6: 1.0}))
    assert not engine.has_unfinished
    engine.check_integrity()

    fits = greedy([1] * 10, 14)
    assert answers(engine, [fits, fits]) == [answer_of(fits)[0]] * 2


def test_an_answer_without_limit_ends_where_the_cache_does() -> None:
    engine = make_engine(drafts=drafter(), num_blocks=10)
    ask = Ask(prompt=(1,) * 10, params=SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    request = ask.submit(engine, "a")
    run(engine)
    assert (len(request.tokens), request.finish_reason) == (24, "length")
    assert request.output == answer_of(ask)[0][:14]


@BOTH
def test_a_pool_for_one_request_at_a_time(read_late: bool) -> None:
    asks = [greedy(TEXT[:8], 16), sampled(TEXT[3:9], 18, seed=1), greedy([1], 20)]
    engine = make_engine(drafts=drafter(), num_blocks=10, read_late=read_late)
    assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]
    assert engine.block_manager.used == 0


def test_a_request_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = make_engine()
    ask = greedy([2], 3)
    first = ask.submit(engine, "a")
    with pytest.raises(ConfigError, match="'a' is in use"):
        ask.submit(engine, "a")
    run(engine)
    second = ask.submit(engine, "a")
    run(engine)
    assert first.output == second.output == answer_of(ask)[0]


@BOTH
@pytest.mark.parametrize("steps", range(12))
def test_abort_at_any_moment(steps: int, read_late: bool) -> None:
    """Step 0 finds it waiting, 1 and 2 half way through its prompt, later ones decoding, the last ones finished."""
    engine = make_engine(drafts=drafter(), max_num_batched_tokens=4, read_late=read_late)
    gone, stays = greedy(TEXT[:11], 6), greedy(TEXT[:9], 12)
    request, other = gone.submit(engine, "gone"), stays.submit(engine, "stays")
    for _ in range(steps):
        engine.step()
    phase, known = request.phase, request.num_output
    engine.abort("gone")
    engine.check_integrity()
    engine.abort("gone")  # twice is no mistake
    engine.abort("never heard of")
    again = gone.submit(engine, "gone")  # the id is free at once, while its last round may be in flight
    run(engine)
    if phase is not Phase.FINISHED:
        assert (request.finish_reason, request.num_output) == ("abort", known)
    assert request.output == answer_of(gone)[0][: request.num_output]
    assert (again.output, other.output) == (answer_of(gone)[0], answer_of(stays)[0])
    assert engine.stats().aborted == (phase is not Phase.FINISHED)
    assert engine.block_manager.used == 0


def test_the_abort_test_meets_every_phase() -> None:
    engine = make_engine(drafts=drafter(), max_num_batched_tokens=4)
    request = greedy(TEXT[:11], 6).submit(engine, "a")
    seen = [request.phase]
    for _ in range(11):
        engine.step()
        seen.append(request.phase)
    assert set(seen) == set(Phase)


def logprobs_from_scratch(text: list[int], start: int, top: int) -> list[TokenLogprobs]:
    """By one pass of the target over the whole text."""
    tokens, positions = torch.tensor(text), torch.arange(len(text))
    states = target()(tokens, positions, DenseCache(TARGET.num_layers, tokens.device).extend(positions))
    logprobs = target().logits(states.final).log_softmax(-1)
    found = []
    for i in range(start, len(text)):
        best = logprobs[i - 1].topk(top)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found.append(TokenLogprobs(token=text[i], logprob=float(logprobs[i - 1, text[i]]), top=tuple(pairs)))
    return found


@pytest.mark.parametrize(
    ("kind", "company", "read_late"),
    [
        (kind, company, (row + column) % 2 == 1)
        for row, kind in enumerate(("plain", "chain", "tree", "sampled"))
        for column, company in enumerate(("few ask", "many ask", "penalties"))
    ],
)
def test_logprobs_are_those_of_the_target_for_drafted_tokens_too(kind: str, company: str, read_late: bool) -> None:
    engine = make_engine(
        drafts=None if kind == "plain" else drafter(),
        tree=TREE if kind == "tree" else None,
        sample_drafts=kind == "sampled",
        read_late=read_late,
        max_num_seqs=16,
        graphs=True,
    )
    asks = [
        greedy(TEXT[:6], 16, logprobs=3),
        sampled(TEXT[:3], 16, seed=2, logprobs=0),
        greedy(TEXT[:4], 16),
    ]
    if company == "many ask":
        asks += [sampled(TEXT[: 3 + n], 16, seed=n, logprobs=n % 7) for n in range(9)]
    if company == "penalties":
        # before penalties and temperature
        asks.append(sampled(TEXT[:7], 16, seed=7, logprobs=6, presence_penalty=1.0))
    else:
        assert not any(request.needs_host for request in [ask.submit(engine, "x") for ask in asks[:1]])
        engine.abort("x")
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(asks)]
    reported: dict[str, list[TokenLogprobs]] = {request.id: [] for request in requests}
    for update in run(engine):
        assert (update.logprobs is None) == (asks[int(update.request_id)].params.logprobs is None)
        reported[update.request_id] += update.logprobs or []
    assert kind == "plain" or sum(request.acceptance.rounds for request in requests) > 10
    for ask, request in zip(asks, requests, strict=True):
        if ask.params.logprobs is None:
            continue
        expected = logprobs_from_scratch(request.tokens, len(request.prompt), ask.params.logprobs)
        assert len(reported[request.id]) == len(expected) == 16
        for found, right in zip(reported[request.id], expected, strict=True):
            assert found.token == right.token
            assert found.logprob == pytest.approx(right.logprob, abs=1e-5)
            assert [token for token, _ in found.top] == [token for token, _ in right.top]
            assert [value for _, value in found.top] == pytest.approx([value for _, value in right.top], abs=1e-5)
    if company != "penalties":
        assert engine.runner.graphs is not None
        sizes = {program.asked.size for program in engine.runner.graphs.captured if program.asked}
        assert sizes >= ({min(FEW, 4)} if company == "few ask" else {engine.config.max_num_seqs})


@BOTH
@pytest.mark.parametrize("count", [3, SLOTS + 3])
def test_bias_penalties_and_least_lengths_take_no_host_but_for_too_many(count: int, read_late: bool) -> None:
    engine = make_engine(drafts=drafter(), read_late=read_late, max_num_seqs=16, graphs=True)
    wishes: list[dict[str, object]] = [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"logit_bias": {3: 4.0, 5: -6.0}},
        {"min_tokens": 9, "stop_token_ids": [3, 4]},
    ]
    asks = [(greedy if n % 2 else sampled)(TEXT[: 3 + n % 5], 6 + n, **wishes[n % 4]) for n in range(count)]
    asks.append(greedy(TEXT[:5], 16))
    for _ in range(2):  # slots are used again
        first = engine.stats().finished
        requests = [ask.submit(engine, f"{first}-{i}") for i, ask in enumerate(asks)]
        engine.step()
        held = [request.slot for request in requests if request.slot is not None]
        assert sorted(held) == list(range(min(count, SLOTS)))
        assert any(request.needs_host for request in requests) == (count > SLOTS)
        run(engine)
        assert [request.output for request in requests] == [answer_of(ask)[0] for ask in asks]
    assert sum(request.acceptance.rounds for request in requests) > 10


@BOTH
def test_speculation_can_be_declined_request_by_request(read_late: bool) -> None:
    engine = make_engine(drafts=drafter(), read_late=read_late)
    asks = [greedy(TEXT[:6], 16), Ask(prompt=TEXT[:6], params=greedy([1], 16).params, speculate=False, eos_ids=())]
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(asks)]
    run(engine)
    assert requests[0].output == requests[1].output == answer_of(asks[0])[0]
    assert requests[0].acceptance.rounds > 0
    assert requests[1].acceptance.rounds == 0


@BOTH
def test_statistics_add_up(read_late: bool) -> None:
    engine = make_engine(drafts=drafter(), read_late=read_late, enable_prefix_caching=False)
    asks = [greedy(TEXT[: 3 + i], 5 + i) for i in range(5)]
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(asks)]
    updates = run(engine)
    greedy([1], 9).submit(engine, "gone")
    engine.step()
    engine.abort("gone")
    statistics = engine.stats()
    assert (statistics.finished, statistics.aborted) == (5, 1)
    assert statistics.prompt_tokens == sum(len(ask.prompt) for ask in asks) + 1
    assert sum(len(update.token_ids) for update in updates) == sum(request.num_output for request in requests)
    assert statistics.output_tokens in (35, 36)  # the aborted one's first token, if it was read
    pooled = sum(request.acceptance.rounds for request in requests)
    assert statistics.acceptance.rounds == pooled
    assert sum(min(update.accepted, len(update.token_ids)) for update in updates) > 0
    assert statistics.steps > 0
    for request in requests:
        assert request.first_token_at is not None
        assert request.finished_at is not None
        assert request.arrived <= request.first_token_at <= request.finished_at


def test_updates_tell_drafted_tokens_from_the_targets_own() -> None:
    engine = make_engine(drafts=drafter())
    ask = greedy(TEXT[:9], 16)
    ask.submit(engine, "a")
    rounds = rounds_of(ask, Speculation(drafter=drafter(), depth=3))
    assert [(update.token_ids, update.accepted) for update in run(engine)] == [
        (list(done.tokens), done.accepted) for done in rounds
    ]


def test_an_idle_engine_steps_without_harm() -> None:
    engine = make_engine(drafts=drafter())
    assert engine.step() == []
    assert engine.stats().steps == 0
    assert answers(engine, [greedy([2], 4)]) == [answer_of(greedy([2], 4))[0]]
    assert engine.step() == []
    engine.check_integrity()


def test_a_tree_too_large_for_one_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 63 nodes"):
        make_engine(drafts=drafter(), depth=16, tree=replace(TREE, width=6, budget=200))


def test_chunks_of_one_token_draft_as_whole_prompts_do() -> None:
    engine = make_engine(drafts=drafter(), max_num_batched_tokens=1, block_size=1, num_blocks=300)
    asks = [greedy(TEXT[:9], 8), sampled(TEXT[:7], 8, seed=3)]
    requests = run_checking_drafts(engine, "eagle3.1", asks)
    assert [request.output for request in requests] == [answer_of(ask)[0] for ask in asks]


# With text: the offline API on a pair on disk.


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("pair")
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,))
    model = make_target(config)
    save_target(model, root / "target")
    save_drafter(make_drafter(EAGLE_3_1.config_for(config), model), root / "drafter")
    save_tokenizer(root / "target")
    return root


@pytest.fixture(name="llm")
def _llm(pair: Path) -> Iterator[LLM]:
    llm = LLM(pair / "target", speculative_config={"model": str(pair / "drafter")}, kv_cache_bytes=2**21)
    yield llm
    llm.engine.check_integrity()
    assert not llm._answers
    assert not llm.engine.has_unfinished


def test_n_answers_differ_follow_from_the_seed_and_share_the_prompts_blocks(llm: LLM) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 6
    params = SamplingParams(temperature=1.2, max_tokens=8, n=5, seed=11)
    (output,) = llm.generate([prompt], params)
    assert [answer.index for answer in output.outputs] == list(range(5))
    texts = [answer.token_ids for answer in output.outputs]
    assert len(set(texts)) == 5
    (again,) = llm.generate([prompt], params)
    assert [answer.token_ids for answer in again.outputs] == texts
    assert again.metrics.cached_tokens == 5 * 32
    (alone,) = llm.generate([prompt], replace(params, n=1, seed=13))
    assert alone.outputs[0].token_ids == texts[2]


def test_the_largest_seed_has_successors_too(llm: LLM) -> None:
    params = SamplingParams(temperature=1.2, max_tokens=6, n=3, seed=2**63 - 1)
    (output,) = llm.generate([[1, 2]], params)
    assert len({answer.token_ids for answer in output.outputs}) == 3


def test_a_prompt_that_is_refused_takes_the_others_of_its_call_back(pair: Path) -> None:
    llm = LLM(pair / "target", kv_cache_bytes=2**18)
    with pytest.raises(PromptError, match="KV cache"):
        llm.generate([[1, 2, 3], [1] * 240], SamplingParams(max_tokens=50))
    assert not llm._answers
    assert not llm.engine.has_unfinished


def test_a_stop_string_over_several_rounds_ends_the_request_at_once(llm: LLM) -> None:
    free = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=30))[0].outputs[0]
    stop = free.text[6:14]
    cut = llm.generate(["Hello", "other"], SamplingParams(temperature=0, max_tokens=30, stop=[stop]))[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (free.text[:6], "stop", stop)
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert (llm.engine.stats().finished, llm.engine.stats().aborted) == (3, 0)


def test_a_stream_that_is_dropped_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("Hello", SamplingParams(temperature=0, max_tokens=30))
    next(stream)
    assert llm.engine.has_unfinished
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_unfinished
    assert llm.engine.stats().aborted == 1


def test_streams_can_be_read_side_by_side(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = [output.outputs[0].token_ids for output in llm.generate(["Hello", "there"], params)]
    streams = [llm.stream(prompt, params) for prompt in ("Hello", "there")]
    found: list[tuple[int, ...]] = [(), ()]
    ended = [False, False]
    while not all(ended):
        for i, stream in enumerate(streams):
            for event in itertools.islice(stream, 1):
                found[i] += event.token_ids
                ended[i] = event.output is not None
    assert found == expected


@pytest.mark.parametrize("depth", [0, 3])
def test_no_round_is_launched_for_an_answer_that_what_is_in_flight_must_end(depth: int) -> None:
    """Reading late, the next round is under way before the last is known; not where it cannot be wanted."""
    engine = make_engine(drafts=drafter() if depth else None, depth=depth, read_late=True)
    assert answers(engine, [greedy([2, 3, 4], 1)]) == [answer_of(greedy([2, 3, 4], 1))[0]]
    assert engine.stats().steps == 1
    several = [greedy([2, 3, 4], 1), greedy([3, 4], 7), greedy([5], 2)]
    assert answers(engine, several) == [answer_of(ask)[0] for ask in several]


@pytest.mark.parametrize("read_late", [False, True])
def test_the_scheduler_is_told_how_long_prompts_take(read_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(read_late=read_late, max_num_batched_tokens=4)
    seen: list[tuple[int, float]] = []
    monkeypatch.setattr(engine.scheduler, "observe_prefill", lambda tokens, seconds: seen.append((tokens, seconds)))
    add_request(engine, "a", [3] * 6, SamplingParams(temperature=0, max_tokens=5))
    run(engine)
    assert [tokens for tokens, _ in seen] == [4, 2]
    assert all(0 < seconds < 60 for _, seconds in seen)
