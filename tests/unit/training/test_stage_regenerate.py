"""regenerate: the target's own answers, the same however the work was cut up or interrupted."""

import hashlib
import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fledge import LLM, SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.errors import CheckpointError, DataError, FledgeError
from fledge.evaluation.dialogue import answer_seed
from fledge.training.data.examples import TokenStore
from fledge.training.recipe import Recipe
from fledge.training.stages import prepare, regenerate
from fledge.training.stages.regenerate import STAGE
from tests.unit.training.data.stage_cases import make_recipe, run_stage, save_tiny_target, write_lines
from tests.unit.training.data.templates import THINK, chat, make_tokenizer

METRICS = RequestMetrics(
    acceptance=AcceptanceStatistics(), cached_tokens=0, preemptions=0, time_to_first_token=0.0, seconds=0.0
)
STOP = make_tokenizer().eos_token_id


class KilledError(Exception):
    pass


@dataclass
class FakeLLM:
    """Answers with letters that follow from prompt and seed; `dies_after` calls it is killed."""

    max_model_len: int = 256
    dies_after: int | None = None
    calls: int = 0
    thinks: bool = False

    def __post_init__(self) -> None:
        self.tokenizer = make_tokenizer()

    def generate(
        self,
        prompts: list[list[int]],
        sampling_params: list[SamplingParams],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        if self.calls == self.dies_after:
            raise KilledError
        self.calls += 1
        return [self._answer(prompt, params) for prompt, params in zip(prompts, sampling_params, strict=True)]

    def _answer(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        assert len(prompt) + (params.max_tokens or 0) <= self.max_model_len
        text = hashlib.sha256(f"{prompt} {params.seed}".encode()).hexdigest()[:6]
        text = f"so\n</think>\n{text}" if self.thinks else text
        ids = [*self.tokenizer.encode(text), STOP][: params.max_tokens]
        answer = CompletionOutput(
            index=0,
            text=text,
            token_ids=tuple(ids),
            finish_reason="stop" if ids[-1] == STOP else "length",
            stop_reason=None,
        )
        return RequestOutput(
            request_id="0", prompt=None, prompt_token_ids=tuple(prompt), outputs=(answer,), metrics=METRICS
        )


@pytest.fixture(name="target", scope="module")
def _target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("regenerate") / "target")


def questions(tmp_path: Path, count: int = 10) -> Path:
    records = [{"messages": chat(f"question {i}"), "category": "ab"[i % 2]} for i in range(count)]
    return write_lines(tmp_path / "data.jsonl", records)


def with_section(recipe: Recipe, **changes: Any) -> Recipe:
    return replace(recipe, regenerate=replace(recipe.regenerate, **changes))


def answered(recipe: Recipe, root: Path, fake: FakeLLM | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run prepare and regenerate below `root`."""
    if fake is not None:
        monkeypatch.setattr(regenerate, "open_llm", lambda _recipe: fake)
    run_stage(prepare.STAGE, recipe, root / "prepare")
    return run_stage(STAGE, recipe, root / "regenerate", prepare=root / "prepare")


def opened(root: Path) -> TokenStore:
    return TokenStore(root / "regenerate" / "examples")


def runs(store: TokenStore, i: int) -> tuple[list[int], list[int]]:
    """Tokens that are not answer, and tokens that are."""
    tokens, answer = store.example(i)
    return tokens[~answer].tolist(), tokens[answer].tolist()


def test_examples_are_the_prompts_as_served_and_the_ids_generated(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(target, questions(tmp_path), regenerate=True)
    summary = answered(recipe, tmp_path, FakeLLM(), monkeypatch)
    store = opened(tmp_path)
    assert summary["examples"] == summary["answers"] == len(store) == 10
    assert summary["categories"] == {"a": 5, "b": 5}
    tokenizer = load_tokenizer(target)
    for i in range(10):
        prompt, answer = runs(store, i)
        assert prompt == encode_chat(tokenizer, chat(f"question {i}"))
        seed = answer_seed(0, i, 0, 0)
        expected = hashlib.sha256(f"{prompt} {seed}".encode()).hexdigest()[:6]
        assert answer == [*make_tokenizer().encode(expected), STOP]


def test_killed_in_the_middle_and_started_again_it_gives_the_same(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = with_section(make_recipe(target, questions(tmp_path), regenerate=True), samples=2, temperature=0.8)
    answered(recipe, tmp_path / "whole", FakeLLM(), monkeypatch)
    with pytest.raises(KilledError):
        answered(recipe, tmp_path / "cut", FakeLLM(dies_after=2), monkeypatch)
    parts = tmp_path / "cut" / "regenerate" / "parts"
    assert len(list(parts.iterdir())) == 2
    (parts / ".answers-000000008-000000010.jsonl.tmp").write_text('{"prompt": 8')  # killed while writing
    again = FakeLLM()
    monkeypatch.setattr(regenerate, "open_llm", lambda _recipe: again)
    run_stage(STAGE, recipe, tmp_path / "cut" / "regenerate", prepare=tmp_path / "cut" / "prepare")
    assert again.calls == 1  # only the chunk that was missing
    assert opened(tmp_path / "cut").digest == opened(tmp_path / "whole").digest
    assert len(opened(tmp_path / "whole")) == 20


def test_chunks_do_not_matter_and_samples_and_seeds_do(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(target, questions(tmp_path), regenerate=True)
    digests = []
    for chunk, seed in ((3, 0), (100, 0), (3, 1)):
        root = tmp_path / f"{chunk}-{seed}"
        answered(with_section(recipe, chunk=chunk, seed=seed), root, FakeLLM(), monkeypatch)
        digests.append(opened(root).digest)
    assert digests[0] == digests[1] != digests[2]
    assert len({answer_seed(s, p, n, t) for s in range(3) for p in range(3) for n in range(3) for t in range(3)}) == 81
    keys = [
        STAGE.key(with_section(recipe, chunk=c, max_num_seqs=m, seed=s), {"prepare": "x"})
        for c, m, s in ((3, 1, 0), (4, 9, 0), (3, 1, 1))
    ]
    assert keys[0] == keys[1] != keys[2]


def test_each_answer_has_one_of_the_temperatures_by_its_seed(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(target, questions(tmp_path, 60), regenerate=True)
    seen: list[dict[int, float]] = []
    for name, chunk in (("a", 7), ("b", 60)):
        fake, used = FakeLLM(), dict[int, float]()
        inner = fake._answer
        monkeypatch.setattr(
            fake, "_answer", lambda p, s, used=used, inner=inner: (used.update({s.seed: s.temperature}), inner(p, s))[1]
        )
        answered(with_section(recipe, temperatures=(0.0, 0.0, 1.0), chunk=chunk), tmp_path / name, fake, monkeypatch)
        seen.append(used)
    assert seen[0] == seen[1]
    assert 8 <= sum(temperature == 1.0 for temperature in seen[0].values()) <= 32
    assert set(seen[0].values()) == {0.0, 1.0}
    changed = {STAGE.key(with_section(recipe, **one), {"prepare": "x"}) for one in ({}, {"temperatures": (0.0, 1.0)})}
    assert len(changed) == 2


def test_cut_answers_are_kept_without_an_end_token_and_long_prompts_dropped(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "data.jsonl", [{"messages": chat("x")}, {"messages": chat("y" * 100)}])
    recipe = with_section(make_recipe(target, source, regenerate=True), max_tokens=4)
    summary = answered(recipe, tmp_path, FakeLLM(max_model_len=100), monkeypatch)
    assert (summary["cut_by_max_tokens"], summary["dropped_too_long"], summary["examples"]) == (1, 1, 1)
    _, answer = runs(opened(tmp_path), 0)
    assert len(answer) == 4
    assert STOP not in answer
    both = write_lines(tmp_path / "both.jsonl", [{"messages": chat("x")}, {"messages": chat("xyz")}])
    room = len(encode_chat(load_tokenizer(target), chat("x"))) + 7  # for one whole answer, and not for the other
    only_whole = with_section(make_recipe(target, both, regenerate=True), keep_cut=False)
    summary = answered(only_whole, tmp_path / "whole", FakeLLM(max_model_len=room), monkeypatch)
    assert (summary["answers"], summary["cut_by_max_tokens"], summary["examples"]) == (2, 1, 1)
    assert runs(opened(tmp_path / "whole"), 0)[1][-1] == STOP
    with pytest.raises(DataError, match="no prompt could be answered"):
        answered(recipe, tmp_path / "none", FakeLLM(max_model_len=10), monkeypatch)


def test_all_turns_are_answered_one_after_another(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"messages": chat("one", "IGNORED", "two", "IGNORED", "three", system="s")}, {"messages": chat("a")}]
    recipe = with_section(
        make_recipe(target, write_lines(tmp_path / "data.jsonl", records), regenerate=True), turns="all"
    )
    fake = FakeLLM()
    summary = answered(recipe, tmp_path, fake, monkeypatch)
    assert fake.calls == 3  # rounds, each over all conversations
    assert (summary["answers"], summary["examples"]) == (4, 2)
    store, tokenizer = opened(tmp_path), load_tokenizer(target)
    assert tokenizer is not None
    text = tokenizer.decode(store.example(0)[0].tolist())
    assert "IGNORED" not in text
    history: list[dict[str, str]] = [{"role": "system", "content": "s"}]
    generated: list[int] = []
    for turn, question in enumerate(("one", "two", "three")):
        history.append({"role": "user", "content": question})
        prompt = encode_chat(tokenizer, history)
        said = hashlib.sha256(f"{prompt} {answer_seed(0, 0, 0, turn)}".encode()).hexdigest()[:6]
        history.append({"role": "assistant", "content": said})
        generated += [*tokenizer.encode(said), STOP]
    assert runs(store, 0)[1] == generated  # one sequence, the mask on all three answers


def test_where_history_is_rewritten_each_turn_is_an_example_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_tiny_target(tmp_path / "target", THINK)
    source = write_lines(tmp_path / "data.jsonl", [{"messages": chat("one", "-", "two")}])
    recipe = with_section(make_recipe(target, source, regenerate=True), turns="all", max_tokens=40)
    summary = answered(recipe, tmp_path, FakeLLM(thinks=True), monkeypatch)
    assert (summary["answers"], summary["examples"], summary["turns_apart"]) == (2, 2, 1)
    store, tokenizer = opened(tmp_path), load_tokenizer(target)
    assert tokenizer is not None
    for i in range(2):
        prompt, answer = runs(store, i)
        assert tokenizer.decode(prompt).endswith("<think>\n")
        assert tokenizer.decode(answer).startswith("so\n</think>\n")
        assert answer[-1] == STOP
    assert "so" not in tokenizer.decode(runs(store, 1)[0])


def test_prompts_beyond_the_minutes_are_left_out(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(target, questions(tmp_path), regenerate=True)
    timed = with_section(recipe, max_minutes=1e-6)
    assert STAGE.key(timed, {"prepare": ""}) != STAGE.key(recipe, {"prepare": ""})
    summary = answered(timed, tmp_path / "some", FakeLLM(), monkeypatch)
    assert summary["answers"] == len(opened(tmp_path / "some")) == 4  # one chunk in any case
    assert summary["prompts_left_out_by_max_minutes"] == 6
    answered(recipe, tmp_path / "all", FakeLLM(), monkeypatch)
    for i in range(4):
        assert runs(opened(tmp_path / "some"), i) == runs(opened(tmp_path / "all"), i)


def test_all_tokens_teach_where_the_recipe_says_so(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(target, questions(tmp_path), regenerate=True, loss_on="all")
    answered(recipe, tmp_path, FakeLLM(), monkeypatch)
    store = opened(tmp_path)
    assert store.answer_tokens == store.total_tokens - len(store)


def test_disabled_it_passes_through(target: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl", [{"messages": chat("q", "a")}])
    recipe = make_recipe(target, source)
    run_stage(prepare.STAGE, recipe, tmp_path / "prepare")
    assert run_stage(STAGE, recipe, tmp_path / "regenerate", prepare=tmp_path / "prepare") == {"enabled": False}
    inputs = {"prepare": tmp_path / "prepare", "regenerate": tmp_path / "regenerate"}
    assert len(TokenStore(regenerate.examples_directory(inputs))) == 1


def test_a_target_that_the_engine_cannot_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target")
    config = (target / "config.json").read_text().replace('"llama"', '"phi"')
    (target / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"phi.*regenerate\.enabled=false"):
        regenerate.open_llm(make_recipe(target, questions(tmp_path), regenerate=True))


def test_the_key_follows_the_weights(tmp_path: Path) -> None:
    source = questions(tmp_path)
    keys = {
        STAGE.key(
            make_recipe(save_tiny_target(tmp_path / str(seed), seed=seed), source, regenerate=True), {"prepare": "x"}
        )
        for seed in (0, 1)
    }
    assert len(keys) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_a_real_engine_any_batch_gives_what_the_target_answers(
    target: Path, tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = with_section(make_recipe(target, questions(tmp_path, 6), regenerate=True), temperature=temperature)
    for name, chunk, together in (("one", 2, 1), ("many", 6, 6)):
        answered(with_section(recipe, chunk=chunk, max_num_seqs=together), tmp_path / name, None, monkeypatch)
    assert opened(tmp_path / "one").digest == opened(tmp_path / "many").digest
    llm = LLM(target, device="cpu")
    store = opened(tmp_path / "one")
    for i in range(6):
        prompt, answer = runs(store, i)
        params = SamplingParams(temperature=temperature, max_tokens=12, seed=answer_seed(0, i, 0, 0))
        assert prompt == llm.encode_chat(chat(f"question {i}"))
        assert answer == list(llm.generate([prompt], params)[0].outputs[0].token_ids)


def test_an_answer_of_the_engine_ends_with_its_end_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save_tiny_target(tmp_path / "target")
    recipe = make_recipe(target, questions(tmp_path, 1), regenerate=True)
    free = LLM(target, device="cpu").generate([_first_prompt(target)], SamplingParams(temperature=0, max_tokens=12))
    stop = free[0].outputs[0].token_ids[5]
    config = (target / "config.json").read_text().replace(f'"eos_token_id": {STOP}', f'"eos_token_id": {stop}')
    (target / "config.json").write_text(config)
    answered(recipe, tmp_path, None, monkeypatch)
    _, answer = runs(opened(tmp_path), 0)
    assert answer[-1] == stop
    assert len(answer) <= 6


def _first_prompt(target: Path) -> list[int]:
    return encode_chat(load_tokenizer(target), chat("question 0"))


class _Copy(multiprocessing.get_context("fork").Process):
    """A copy of this process, which has imported everything, with what a new one gets: pickled and read again."""

    def __init__(self, *, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        *values, sender = args
        target, values = pickle.loads(pickle.dumps((target, values)))
        super().__init__(target=target, args=(*values, sender), daemon=daemon)


@pytest.fixture(name="_copies")
def _processes_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.get_context("spawn"), "Process", _Copy)


@pytest.mark.usefixtures("_copies")
def test_several_processes_give_what_one_gives(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = with_section(make_recipe(target, questions(tmp_path, 6), regenerate=True), chunk=2, temperature=1.0)
    for name, processes in (("one", 1), ("two", 2)):
        answered(with_section(recipe, processes=processes), tmp_path / name, None, monkeypatch)
    one, two = (TokenStore(tmp_path / name / "regenerate" / "examples") for name in ("one", "two"))
    assert one.digest == two.digest


@pytest.mark.usefixtures("_copies")
def test_a_process_that_fails_says_why(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = with_section(make_recipe(target, questions(tmp_path, 4), regenerate=True), chunk=2, processes=2)
    broken = replace(recipe, target=replace(recipe.target, dtype="float7"))
    with pytest.raises(FledgeError, match="float7"):
        answered(broken, tmp_path / "run", None, monkeypatch)


def test_processes_on_one_gpu_get_a_share_of_its_memory(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(target, questions(tmp_path, 1), regenerate=True)
    opened: list[dict[str, Any]] = []
    monkeypatch.setattr(regenerate, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 100 << 30))  # the others have taken the rest
    monkeypatch.setattr(regenerate, "LLM", lambda *_, **options: opened.append(options))
    for processes in (1, 8):
        regenerate.open_llm(with_section(recipe, processes=processes))
    assert opened[0]["kv_cache_bytes"] is None
    assert opened[1]["kv_cache_bytes"] == (88 << 30) // 8 - (3 << 30)
    regenerate.open_llm(with_section(recipe, processes=4, gpu_memory_utilization=0.5))
    assert opened[2]["kv_cache_bytes"] == (50 << 30) // 4 - (3 << 30)
    with pytest.raises(FledgeError, match=r"too many for the GPU's memory; .*gpu_memory_utilization \(0\.88\)"):
        regenerate.open_llm(with_section(recipe, processes=40))
