"""Real vLLM and Fledge's reference loop decode the same prompts with the same files, and must agree on every number.

Greedy, float32, on the CPU: the same tokens, and in every round the same number of drafts and of accepted drafts. Run
by `make test-vllm`, which builds the environment that FLEDGE_VLLM_PYTHON points to.
"""

import json
import multiprocessing
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.target import load_target
from fledge.decoding.params import SamplingParams
from fledge.decoding.reference import Speculation, generate
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.models.config import DrafterConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import build
from fledge.models.target.decoder import TargetModel
from tests.vllm_parity.pairs import CASES, MAX_POSITIONS, Case, PairDirectories, make_pairs, text

VLLM_PYTHON = os.environ.get("FLEDGE_VLLM_PYTHON")
DEPTHS = (3, 5)
RUNS = [(case, depth) for case in CASES for depth in case.depths]
MAX_TOKENS = 72
PROMPT_LENGTHS = (1, 9, 32)
# Two implementations of float32 arithmetic differ by about 1e-5 here. Where the best two tokens are closer than this,
# either may win, and a difference would mean nothing.
DECISIVE = 1e-3

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM_PYTHON is None, reason="FLEDGE_VLLM_PYTHON is not set (make test-vllm sets it)"),
    pytest.mark.filterwarnings("ignore::fledge.errors.CheckpointWarning"),
]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and ids that end its answer."""

    prompt: tuple[int, ...]
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an engine made of a request. `drafted` and `accepted` have one number for each round."""

    tokens: list[int]
    drafted: list[int]
    accepted: list[int]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pair at one depth, decoded by both engines."""

    requests: list[Request]
    ours: list[Answer]
    theirs: list[Answer]
    their_totals: Mapping[str, Any]


class Results:
    """All runs, by case and depth, and the files they came from."""

    def __init__(self, root: Path) -> None:
        self.directories = make_pairs(CASES)
        requests: dict[str, list[Request]] = {}
        ours: dict[str, list[Answer]] = {}
        pairs = [(case.depths, self.directories[case.name]) for case in CASES]
        with multiprocessing.get_context("fork").Pool(2) as pool:
            answered = pool.starmap(_answered_at, pairs, chunksize=1)
        for case, by_depth in zip(CASES, answered, strict=True):
            for depth, answers in by_depth.items():
                name = run_name(case, depth)
                requests[name], ours[name] = list(answers.keys()), list(answers.values())
        theirs = self._ask_vllm(root, requests)
        self.runs = {
            name: Run(
                requests=requests[name],
                ours=ours[name],
                theirs=[Answer(**values) for values in theirs[name]["answers"]],
                their_totals=theirs[name]["totals"],
            )
            for name in requests
        }

    def _ask_vllm(self, root: Path, requests: Mapping[str, list[Request]]) -> Mapping[str, Any]:
        """Decode every run, with one process for each depth: one core is enough for each."""
        processes = {depth: self._start_vllm(root, depth, requests) for depth in DEPTHS}
        answers: dict[str, Any] = {}
        try:
            for depth, process in processes.items():
                if process.wait(timeout=540) != 0:
                    pytest.fail(f"vLLM failed:\n{(root / f'vllm-{depth}.log').read_text()[-6000:]}", pytrace=False)
                answers |= json.loads((root / f"result-{depth}.json").read_text(encoding="utf-8"))
        finally:
            for process in processes.values():
                process.kill()  # nothing to do for one that has ended
        return answers

    def _start_vllm(self, root: Path, depth: int, requests: Mapping[str, list[Request]]) -> subprocess.Popen[bytes]:
        job = {
            "max_tokens": MAX_TOKENS,
            "max_model_len": MAX_POSITIONS,
            "runs": [
                {
                    "name": run_name(case, depth),
                    "target": str(self.directories[case.name].target),
                    "drafter": str(self.directories[case.name].drafter),
                    "method": case.method,
                    "block_size": case.block_size,
                    "num_speculative_tokens": depth,
                    "requests": [vars(request) for request in requests[run_name(case, depth)]],
                }
                for case in CASES
                if depth in case.depths
            ],
        }
        job_file, result_file = root / f"job-{depth}.json", root / f"result-{depth}.json"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        script = Path(__file__).with_name("run_vllm.py")
        command = [str(VLLM_PYTHON), str(script), str(job_file), str(result_file)]
        with (root / f"vllm-{depth}.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    assert Path(str(VLLM_PYTHON)).is_file(), f"FLEDGE_VLLM_PYTHON: no file {VLLM_PYTHON}"
    return Results(tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize(("case", "depth"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_fledge_and_vllm_agree_on_every_round(results: Results, case: Case, depth: int) -> None:
    run = results.runs[run_name(case, depth)]
    difference = first_difference(run)
    assert difference is None, f"{case.name}, K={depth}, {difference}"

    ours = pooled(run.ours)
    assert {
        "drafts": ours.rounds,
        "draft_tokens": sum(ours.drafted_by_depth),
        "accepted_tokens": sum(ours.accepted_by_depth),
        "accepted_tokens_per_pos": list(ours.accepted_by_depth),
    } == run.their_totals


@pytest.mark.parametrize(("case", "depth"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_drafters_are_right_sometimes_and_wrong_sometimes(results: Results, case: Case, depth: int) -> None:
    """Agreement on drafters that are never or always right would show little."""
    statistics = pooled(results.runs[run_name(case, depth)].theirs)
    accepted = statistics.accepted_by_depth
    assert all(0 < count < statistics.rounds for count in accepted[:3]), accepted


@pytest.mark.parametrize("depth", DEPTHS)
def test_rounds_end_beyond_the_limit_and_beyond_stop_tokens(results: Results, depth: int) -> None:
    """vLLM counts drafts that it accepted after the last token it returned. Make sure the runs have such rounds."""
    runs = [results.runs[run_name(case, depth)] for case in CASES if depth in case.depths]
    answers = [pair for run in runs for pair in zip(run.requests, run.theirs, strict=True)]
    trimmed = [request for request, theirs in answers if verified_tokens(theirs) > len(theirs.tokens)]
    assert any(request.stop_token_ids for request in trimmed)
    assert any(not request.stop_token_ids for request in trimmed)


@pytest.mark.parametrize(
    ("case_name", "change"),
    [
        ("eagle3.1", {"norm_output": False}),
        ("eagle3", {"norm_output": True}),
        ("norm-before-residual", {"norm_before_residual": False}),
        ("eagle3.1", {"aux_layer_ids": (1, 3, 4)}),
        ("eagle3", {"aux_layer_ids": (3, 5, 6)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_wrong_switch_shows_in_the_rounds_and_never_in_the_tokens(
    results: Results, case_name: str, change: dict[str, Any]
) -> None:
    run = results.runs[f"{case_name}-{DEPTHS[0]}"]
    target, drafter = load_pair(results.directories[case_name])
    wrong = rebuilt(drafter, replace(drafter.config, **change), target)
    answers = [answer(target, wrong, DEPTHS[0], request) for request in run.requests]
    assert [a.tokens for a in answers] == [t.tokens for t in run.theirs]
    assert [a.accepted for a in answers] != [t.accepted for t in run.theirs]
    assert pooled(answers).accepted_by_depth != pooled(run.theirs).accepted_by_depth


def run_name(case: Case, depth: int) -> str:
    return f"{case.name}-{depth}"


def load_pair(directories: PairDirectories) -> tuple[TargetModel, Drafter]:
    target = load_target(directories.target)
    return target, load_drafter(directories.drafter, target)


def rebuilt(drafter: Drafter, config: DrafterConfig, target: TargetModel) -> Drafter:
    other = build(config)
    other.load_state_dict(drafter.state_dict(), strict=False)
    other.share_with(target)
    return other.eval()


def answer(target: TargetModel, drafter: Drafter, depth: int, request: Request) -> Answer:
    params = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, stop_token_ids=request.stop_token_ids
    )
    speculation = Speculation(drafter=drafter, depth=depth)
    rounds = list(generate(target, request.prompt, params, speculation=speculation))
    return Answer(
        tokens=[token for r in rounds for token in r.tokens],
        drafted=[r.drafted for r in rounds if r.drafted],
        accepted=[r.accepted for r in rounds if r.drafted],
    )


def _answered_at(depths: Sequence[int], directories: PairDirectories) -> dict[int, dict[Request, Answer]]:
    pair = load_pair(directories)
    return {depth: decisive_answers(*pair, depth) for depth in depths}


def decisive_answers(target: TargetModel, drafter: Drafter, depth: int) -> dict[Request, Answer]:
    """Answer prompts from the text on which no choice is close, and the last of them again with a stop token."""
    answers: dict[Request, Answer] = {}
    for start in range(0, len(text()), 997):
        length = PROMPT_LENGTHS[len(answers)]
        request = Request(prompt=tuple(text()[start : start + length].tolist()))
        with narrowest_choice(target, drafter) as narrowest:
            answered = answer(target, drafter, depth, request)
        if min(narrowest) > DECISIVE:
            answers[request] = answered
        if len(answers) == len(PROMPT_LENGTHS):
            break
    assert len(answers) == len(PROMPT_LENGTHS), "too few prompts on which every choice is decisive"
    stopping = replace(request, stop_token_ids=(answered.tokens[MAX_TOKENS // 2],))
    answers[stopping] = answer(target, drafter, depth, stopping)
    return answers


@contextmanager
def narrowest_choice(target: TargetModel, drafter: Drafter) -> Iterator[list[float]]:
    """Collect how far apart the best two logits were, the narrowest of each call of a head."""
    narrowest: list[float] = []

    def record(_module: nn.Module, _inputs: tuple[Tensor, ...], logits: Tensor) -> None:
        best, second = logits.topk(2, dim=-1).values.unbind(-1)
        narrowest.append(float((best - second).min()))

    assert drafter.lm_head is not None
    handles = [head.register_forward_hook(record) for head in {target.lm_head, drafter.lm_head}]
    try:
        yield narrowest
    finally:
        for handle in handles:
            handle.remove()


def pooled(answers: Sequence[Answer]) -> AcceptanceStatistics:
    statistics = AcceptanceStatistics()
    for one in answers:
        for drafted, accepted in zip(one.drafted, one.accepted, strict=True):
            statistics.add(drafted=drafted, accepted=accepted)
    return statistics


def verified_tokens(one: Answer) -> int:
    """Tokens that verification yielded, kept or not: one from the prompt, then accepted drafts and one more a round."""
    return 1 + sum(accepted + 1 for accepted in one.accepted)


def first_difference(run: Run) -> str | None:
    """Say where the two first part, in the order in which an engine produces things; None if nowhere."""
    for i, (request, ours, theirs) in enumerate(zip(run.requests, run.ours, run.theirs, strict=True)):
        where = f"prompt {i} ({len(request.prompt)} tokens)"
        for what in ("tokens", "drafted", "accepted"):
            mine, other = getattr(ours, what), getattr(theirs, what)
            if mine == other:
                continue
            place = next((n for n, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
            if place is None:
                unit = "tokens" if what == "tokens" else "rounds"
                return f"{where}: {len(mine)} {unit} in Fledge, {len(other)} in vLLM"
            if what == "tokens":
                return f"{where}, token {place}: {mine[place]} in Fledge, {other[place]} in vLLM"
            return f"{where}, round {place}: {mine[place]} drafts {what} in Fledge, {other[place]} in vLLM"
    return None
