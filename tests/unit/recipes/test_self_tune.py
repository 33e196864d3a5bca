"""Own answers: judged, packed into lessons, learnt from; and HumanEval's counts."""

import json
import random
import time
from pathlib import Path

import pytest
import torch

from recipes.demo import humaneval, jsonlines, self_tune
from recipes.demo import tokenizer as tokenizer_recipe
from recipes.demo.answers import Answer, Engines
from recipes.demo.chat_tune import write_model
from recipes.demo.data import Encoder
from recipes.demo.execution import succeeds
from recipes.demo.judging import Request, Verdict, checks, conclusion, judge, loop_tokens, repeated_share
from recipes.demo.model import SHAPES, Llama

LOOP = [90, 91, 92, *[1, 2, 3, 4] * 8]


def answer(text: str = "", ids: list[int] | None = None, ended: bool = True) -> Answer:
    return Answer([7, 8], list(range(100, 120)) if ids is None else ids, text, ended)


def test_loop_tokens_begin_where_the_loop_does_and_spare_a_phrase_that_returns() -> None:
    places = loop_tokens(LOOP)
    assert places[0] == 10  # a few tokens into the first sequence of eight that comes again
    assert places[-1] == places[0] + 11  # the choice to repeat: what follows only copies
    assert loop_tokens(LOOP, reach=100)[-1] == len(LOOP) - 1
    phrase = list(range(8))
    assert loop_tokens([*phrase, 50, 51, 52, *phrase, 60, 61]) == []
    assert repeated_share([answer(ids=LOOP), answer(ids=[])]) == pytest.approx(28 / 35)


def test_a_request_s_examples_and_assertions_become_checks() -> None:
    request = 'def f(x):\n    """Double.\n    >>> f(2)\n    4\n    >>> f(\n    >>> f("a b")\n    \'a ba b\'\n    """\n'
    assert checks(request) == ["assert (f(2)) == (4)", "assert (f(\"a b\")) == ('a ba b')"]
    assert checks("Pass this test:\nassert f(1) == 2\nassert that it works") == ["assert f(1) == 2"]
    assert checks("What is a Pod?") == []


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3 + 4 = 7\n\n#### 7", (7.0,)),
        ("So the answer is Carla: 136, Jamal: 153.", (136.0, 153.0)),
        (r"Therefore $n=\boxed{8{,}880}$.", (8880.0,)),
        ("Final answer: 1,250.50", (1250.5,)),
        ("There are 12 of them.", None),
    ],
)
def test_conclusions_are_the_numbers_a_solution_ends_with(text: str, numbers: tuple[float, ...] | None) -> None:
    assert conclusion(text) == numbers


def test_judging() -> None:
    double = Request([], "Complete it:\n>>> double(3)\n6")
    sums = Request([], "What is 3 + 4?", reference="#### 7")
    right, wrong = (f"```python\ndef double(x):\n    return {body}\n```" for body in ("2 * x", "x * x * 2"))
    cases = [
        (Request([]), answer("It is a method."), Verdict.GOOD),
        (Request([]), answer("It is a", ended=False), Verdict.OTHER),
        (Request([]), answer("Yes", ids=[5, 3]), Verdict.OTHER),
        (Request([]), answer("again and", ids=LOOP), Verdict.LOOPING),
        (double, answer(right), Verdict.GOOD),
        (double, answer(wrong), Verdict.OTHER),
        (double, answer("Doubles."), Verdict.OTHER),
        (Request([]), answer("```python\ndef f(:\n```"), Verdict.OTHER),
        (sums, answer("The answer is 7."), Verdict.GOOD),
        (sums, answer("#### 8"), Verdict.OTHER),
    ]
    asked, said, wanted = zip(*cases, strict=True)
    assert judge(asked, said, workers=2) == list(wanted)


def test_programs_have_limits() -> None:
    assert succeeds("assert 1 + 1 == 2")
    for program in ("while True: pass", "bytearray(4 << 30)", "open('x', 'w').write('y' * 9999)", "1 / 0", "x = '\0'"):
        began = time.monotonic()
        assert not succeeds(program, seconds=0.5), program
        assert time.monotonic() - began < 5


def test_humaneval_counts_code_that_parses_and_passes(tmp_path: Path) -> None:
    tasks = [
        {
            "prompt": f'import math\n\n\ndef f{n}(x):\n    """Root."""\n',
            "entry_point": f"f{n}",
            "test": "def check(f):\n    assert f(9) == 3",
        }
        for n in range(4)
    ]
    answers = [
        "```python\ndef f0(x):\n    return math.sqrt(x)\n```",
        "```python\ndef f1(x):\n    return x\n```",
        "```python\ndef f2(x:\n```",
        "    return math.isqrt(x)",
    ]
    assert humaneval.score(tasks, answers, 2) == {"tasks": 4, "code": 3, "parses": 2, "passes": 2, "passed": [0, 3]}
    (tmp_path / "other.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(SystemExit, match="not HumanEval's file"):
        humaneval.load(tmp_path / "other.jsonl")


def test_lessons_are_good_answers_whole_and_the_loops_of_others() -> None:
    own = [answer(ids=[4, 5, 6, 3]), answer(ids=LOOP), answer(ids=[9, 9])]
    good, unlikely, share = self_tune.lessons(own, [Verdict.GOOD, Verdict.LOOPING, Verdict.OTHER], 64, 1)
    assert [t for t in good.targets[0].tolist() if t >= 0] == [4, 5, 6, 3]
    assert good.tokens[0, :5].tolist() == [7, 8, 4, 5, 6]
    assert [t for t in unlikely.targets[0].tolist() if t >= 0] == LOOP[10:22]
    assert share == pytest.approx(12 / 41)
    assert len(self_tune.lessons(own[2:], [Verdict.OTHER], 64, 1)[0]) == 0


def test_unlikelihood_pushes_marked_tokens_down() -> None:
    logits = torch.zeros(1, 3, 5, requires_grad=True)
    targets = torch.tensor([[2, -100, 4]])
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none"
    )
    self_tune.unlikelihood(losses.view(1, 3), targets).backward()
    assert logits.grad is not None
    assert logits.grad[0, 0, 2] > 0  # descent lowers it
    assert logits.grad[0, 2, 4] > 0
    assert logits.grad[0, 1].abs().sum() == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows nothing, with a tokenizer of 512 entries and conversations beside it."""
    folder, rng = tmp_path_factory.mktemp("model"), random.Random(0)
    letters = [" ".join("".join(rng.choices("abcdefghij", k=6)) for _ in range(3000)), "user assistant 12 = + def"]
    tokenizer_recipe.save(tokenizer_recipe.train(iter(letters), 512), folder / "tokenizer")
    torch.manual_seed(0)
    write_model(Llama(SHAPES["tiny"]), Encoder(folder / "tokenizer"), folder / "tokenizer", folder / "base")
    talk = [
        {
            "messages": [
                {"role": "user", "content": f"abc {n}"},
                {"role": "assistant", "content": " ".join("".join(rng.choices("abcdefghij", k=6)) for _ in range(6))},
            ],
            "source": "docs-qa/mdn",
        }
        for n in range(150)
    ]
    jsonlines.write(folder / "chat/chat-00.jsonl", talk)
    jsonlines.write(folder / "sets/mt_bench.jsonl", [{"messages": talk[0]["messages"]}] * 3)
    return folder


def tune(model: Path, out: Path, **changes: object) -> list[dict[str, object]]:
    settings = {"rounds": 2, "answered": 12, "steps": 2, "max_tokens": 24, "length": 128, "rows": 2, "device": "cpu"}
    settings |= {"lr": 1e-3, "compiled": False, "workers": 1, "evaluation": model / "sets"} | changes
    self_tune.main(base=model / "base", data=model / "chat", out=out, **settings)
    return list(jsonlines.read(out / "log.jsonl"))


def test_a_run_ends_in_a_model_and_a_broken_one_goes_on(model: Path, tmp_path: Path) -> None:
    log = tune(model, tmp_path / "run", rounds=1)
    assert [record["event"] for record in log] == ["start", "evaluation", "round", "final"]
    assert {"likely", "good_share", "looping_share", "own_repetition", "held_out", "confidence", "mt_bench"} <= set(
        log[2]
    )
    tuned = Engines(tmp_path / "run/model", 8, device="cpu")
    before = Engines(model / "base", 8, device="cpu")
    prompts = [[0, 2, 40 + n] for n in range(4)]
    assert tuned.answer(prompts) != before.answer(prompts)
    before.update(tmp_path / "run/model")
    assert tuned.answer(prompts) == before.answer(prompts)

    with pytest.raises(SystemExit, match="give --resume"):
        tune(model, tmp_path / "run")
    log = tune(model, tmp_path / "run", resume=True)
    assert [record.get("round") for record in log if record["event"] == "round"] == [1, 2]
    assert json.loads((tmp_path / "run/model/config.json").read_text())["model_type"] == "llama"


def test_no_round_begins_when_its_time_is_over(model: Path, tmp_path: Path) -> None:
    log = tune(model, tmp_path / "run", rounds=50, minutes=0.001)
    assert len([record for record in log if record["event"] == "round"]) == 1
    assert log[-1]["event"] == "final"
