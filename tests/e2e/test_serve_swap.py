"""`POST /admin/drafter` on the bundled pair: streams go on, the new drafter drafts, and what fails changes nothing."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from fledge import LLM, SamplingParams
from fledge.checkpoints.source import DRAFTERS, TARGET, resolve
from fledge.engine.engine import LLMEngine
from tests.serving import Serving, make_service

OLD, NEW = DRAFTERS["EAGLE-3"], DRAFTERS["EAGLE-3.1"]
ADMIN = {"Authorization": "Bearer root"}
PROMPTS = ["Write a story about a bird.", "Tell me about the sea."]
TOKENS = 80


@pytest.fixture(name="serving", scope="module")
def _serving() -> Iterator[Serving]:
    speculation = {"model": OLD, "num_speculative_tokens": 5, "adaptive": False}
    llm = LLM(TARGET, speculative_config=speculation, max_num_seqs=4)
    with Serving(make_service(llm, admin_api_keys=("root",), api_keys=("user",))) as serving:
        yield serving
        serving.until_idle()


@pytest.fixture(name="http", scope="module")
def _http(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, timeout=60, headers={"Authorization": "Bearer user"}) as client:
        yield client


def swap(http: httpx.Client, model: Any, headers: dict[str, str] = ADMIN) -> httpx.Response:
    return http.post("/admin/drafter", json={"model": model}, headers=headers)


def ask(prompt: str, **more: Any) -> dict[str, Any]:
    fields = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "speculation": {"report": True}}
    return {"messages": [{"role": "user", "content": prompt}], **fields, **more}


def answers(http: httpx.Client) -> tuple[list[str], list[tuple[int, float]]]:
    """Texts, and how many rounds they took with which acceptance length, one after another."""
    bodies = [http.post("/v1/chat/completions", json=ask(prompt)).json() for prompt in PROMPTS]
    reports = [body["usage"]["speculation"] for body in bodies]
    texts = [body["choices"][0]["message"]["content"] for body in bodies]
    return texts, [(report["rounds"], report["acceptance_length"]) for report in reports]


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"fledge_{name}"))


def test_streams_go_on_with_the_same_text_and_the_new_drafter_is_the_one_that_is_served(
    serving: Serving, http: httpx.Client
) -> None:
    texts, before = answers(http)
    begun, found, done = threading.Barrier(len(PROMPTS) + 1), [""] * len(PROMPTS), threading.Event()
    during = [0] * len(PROMPTS)  # events that came after the swap

    def stream(number: int) -> None:
        body = ask(PROMPTS[number], stream=True)
        with httpx.stream(
            "POST", f"{serving.url}/v1/chat/completions", json=body, timeout=60, headers=dict(http.headers)
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                    if not found[number] and choices[0]["delta"].get("content"):
                        begun.wait(30)
                    during[number] += done.is_set()
                    found[number] += choices[0]["delta"].get("content") or ""

    def slow_step(engine: LLMEngine) -> None:
        """However quick the machine is: streams are not over before the drafter is there."""
        step = engine.step
        engine.step = lambda: (done.wait(0.1), step())[1]  # type: ignore[method-assign]

    serving.in_engine(slow_step)
    threads = [threading.Thread(target=stream, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    begun.wait(30)
    answer = swap(http, NEW)
    done.set()
    for thread in threads:
        thread.join(60)
    serving.in_engine(lambda engine: engine.__dict__.pop("step"))
    assert answer.status_code == 200, answer.text
    assert (answer.json()["drafter"], answer.json()["previous"]) == (NEW, OLD)
    assert found == texts
    assert all(during), "the streams were over before the drafter was there"
    assert serving.service.engine.info.drafter == NEW
    assert serving.in_engine(lambda engine: engine.drafter.config.fc_norm)
    after = answers(http)
    fresh = LLM(TARGET, speculative_config={"model": NEW, "num_speculative_tokens": 5, "adaptive": False})
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    started_with = [
        fresh.chat([{"role": "user", "content": prompt}], params)[0].metrics.acceptance for prompt in PROMPTS
    ]
    assert after == (texts, [(one.rounds, one.acceptance_length) for one in started_with])
    assert after[1] != before
    page = http.get("/dashboard/data").json()
    assert page["server"]["drafter"] == NEW
    watch, metrics = serving.service.metrics.drift_monitor, serving.service.metrics
    assert watch is not None
    assert metrics.baseline == watch.baseline
    # Totals of drafts are the new drafter's; requests that both drafted for say nothing of either.
    counted = serving.in_engine(lambda engine: engine.stats().acceptance)
    assert metric(http, "spec_decode_num_drafts_total") == counted.rounds
    assert watch._total[("all", "")]["clusters"] == len(PROMPTS)
    assert metric(http, 'drafter_swaps_total{model_name="tiny",outcome="exchanged"}') == 1


def test_what_cannot_be_done_is_said_in_one_line_and_the_drafter_stays(
    serving: Serving, http: httpx.Client, tmp_path: Path
) -> None:
    served = serving.service.engine.info.drafter
    damaged, foreign = tmp_path / "damaged", tmp_path / "foreign"
    for copy in (damaged, foreign):
        shutil.copytree(resolve(OLD), copy)
    (damaged / "model.safetensors").write_bytes(b"\0" * 64)
    weights = load_file(foreign / "model.safetensors")
    weights.pop(next(name for name in weights if name.endswith("fc.weight")))
    save_file(weights, foreign / "model.safetensors")
    cases: list[tuple[Any, int, str]] = [
        ("no-such-drafter", 400, "no such directory"),
        (str(tmp_path), 400, "config.json"),
        (TARGET, 400, ""),
        (str(damaged), 400, "model.safetensors"),
        (str(foreign), 400, "fc.weight"),
        ("", 400, "model"),
        ("a\nb", 400, "model"),
        (5, 400, "model"),
    ]
    for model, status, words in cases:
        answer = swap(http, model)
        error = answer.json()["error"]["message"]
        assert (answer.status_code, "\n" in error) == (status, False), answer.text
        assert words in error, answer.text
    assert http.post("/admin/drafter", json={"model": OLD, "depth": 2}, headers=ADMIN).status_code == 400
    assert metric(http, 'drafter_swaps_total{model_name="tiny",outcome="refused"}') == 5
    for headers, status in (({"Authorization": "Bearer user"}, 401), ({"Authorization": ""}, 401)):
        assert swap(http, OLD, headers).status_code == status
    assert http.post("/v1/chat/completions", json=ask("Hi", max_tokens=4), headers=ADMIN).status_code == 401
    assert serving.service.engine.info.drafter == served
    assert http.post("/v1/chat/completions", json=ask("Hi", max_tokens=8)).json()["usage"]["speculation"]["rounds"]


def test_two_at_once_and_a_server_without_admins(serving: Serving, http: httpx.Client) -> None:
    serving.service._loading_drafter = "another"
    error = swap(http, OLD)
    serving.service._next_drafter = None
    assert (error.status_code, error.json()["error"]["code"]) == (409, "swap_under_way")
    admins, serving.service.admin_keys._digests = serving.service.admin_keys._digests, []
    error = swap(http, OLD)
    serving.service.admin_keys._digests = admins
    assert (error.status_code, error.json()["error"]["code"]) == (403, "no_admin_key")
    assert "--admin-api-key" in error.json()["error"]["message"]
