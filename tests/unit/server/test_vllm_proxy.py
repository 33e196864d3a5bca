"""The proxy in front of a vLLM: which requests pass, which are refused, and what is known of them afterwards."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from fledge.engine.vllm_tuning import TunePoint, VllmTuning
from fledge.errors import SwapRefusedError
from fledge.server.options import ServeOptions
from fledge.server.prompts import NO_TEMPLATE, Template
from fledge.server.proxied_requests import ProxiedRequest, ResponseReader, read_request
from fledge.server.vllm_proxy import DrafterReload, VllmProxy
from fledge.vllm_process import extension
from fledge.vllm_process.finding import find_vllm
from fledge.vllm_process.process import VllmProcess
from tests.fake_vllm import install
from tests.serving import Serving

pytestmark = pytest.mark.vllm  # with a stand-in, beside those with the real one

OWN = Template("default", "abc")
WORDS = ["--served-model-name", "tiny", "--speculative-config", '{"num_speculative_tokens": 3}']
DETAILED = ["--per-request-spec-decode-metrics", "detailed"]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10, "temperature": 0}


def make_proxy(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    *,
    detailed: bool = True,
    more: Mapping[str, Any] | None = None,
    **settings: Any,
) -> VllmProxy:
    """`more`: of the proxy; `settings` of the service, and of the stand-in."""
    reload = (more or {}).get("reload")
    names = ServeOptions.__dataclass_fields__
    options = {name: settings.pop(name) for name in list(settings) if name in names}
    install(monkeypatch, directory, **settings)
    environment = {} if reload is None else extension.environment(reload.token)
    words = [*WORDS, *(DETAILED if detailed else [])]
    process = VllmProcess(find_vllm(), "model", words, environment=environment)
    process.wait_until_ready(30, lambda _line: None)
    made = ServeOptions(served_model_names=("tiny",), **options)
    own: Any = {"max_num_seqs": 1, "drafter": "nowhere", "template": OWN, "reports_rounds": detailed, **(more or {})}
    return VllmProxy(process, made, **own)


def until(what: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("fledge.server.vllm_proxy.load_baseline", lambda _drafter: None)
        proxy = make_proxy(
            monkeypatch,
            tmp_path_factory.mktemp("vllm"),
            api_keys=("key",),
            max_body_bytes=4096,
            admin_api_keys=("admin",),
        )
        with Serving(proxy) as running:
            yield running


@pytest.fixture
def client(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, headers={"Authorization": "Bearer key"}, timeout=20) as made:
        yield made


@pytest.fixture
def upstream(serving: Serving) -> Iterator[httpx.Client]:
    """vLLM itself, for comparison."""
    transport = httpx.HTTPTransport(uds=serving.service.engine.process.socket)
    with httpx.Client(base_url="http://vllm", transport=transport) as made:
        yield made


def test_answers_and_streams_are_vllms_own_bytes(client: httpx.Client, upstream: httpx.Client) -> None:
    for body in (CHAT, {"prompt": [1, 2, 3], "max_tokens": 9}):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        streamed = {**body, "stream": True}
        assert client.post(path, json=streamed).content == upstream.post(path, json=streamed).content
        asked = {**streamed, "stream_options": {"include_usage": True}}
        through = client.post(path, json=asked)
        assert through.content == upstream.post(path, json=asked).content
        assert through.headers["content-type"] == "text/event-stream; charset=utf-8"
        (ours, theirs) = (one.post(path, json=body).json() for one in (client, upstream))
        ours["asked"], theirs["asked"] = ours["asked"]["body"], theirs["asked"]["body"]
        assert ours == theirs


def test_what_reaches_vllm(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT, headers={"X-Mine": "yes", "Origin": "http://elsewhere"})
    headers = {name.lower(): value for name, value in answer.json()["asked"]["headers"].items()}
    assert headers["x-mine"] == "yes"
    assert not {"authorization", "origin"} & set(headers)  # keys and origins are judged here
    assert answer.headers["x-request-id"] == f"chatcmpl-{headers['x-request-id']}"
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/nothing").status_code == 404
    refused = client.post("/v1/completions", json={"prompt": [1], "model": "other"})
    assert (refused.status_code, refused.json()["error"]["message"]) == (404, "The model `other` does not exist.")


def test_what_is_refused_before_vllm(serving: Serving, client: httpx.Client) -> None:
    path = serving.url + "/v1/chat/completions"
    for answer in (httpx.post(path, json=CHAT), httpx.get(serving.url + "/v1/models")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert client.post("/v1/completions", json={"prompt": "x" * 5000}).status_code == 413
    assert client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert httpx.get(serving.url + "/health").json() == {"status": "ok"}
    assert httpx.get(serving.url + "/version").json()["vllm"] == "0.32.0"
    assert httpx.get(serving.url + "/").headers["content-type"].startswith("text/html")


def test_acceptance_by_template_and_context_is_known(
    serving: Serving, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("fledge").propagate = True
    with caplog.at_level(logging.INFO, "fledge.request"):
        client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        until(lambda: caplog.records)
    fields = caplog.records[-1].fields  # type: ignore[attr-defined]
    assert (fields["prompt_tokens"], fields["output_tokens"], fields["finish_reason"]) == (1, 10, "length")
    assert (fields["rounds"], fields["acceptance_length"]) == (3, 3.0)  # 1 token of the prompt, then 4, 1, 4
    before = serving.service.metrics.total.templates[OWN].rounds
    client.post("/v1/completions", json={"prompt": [1] * 600, "max_tokens": 5})
    total = serving.service.metrics.total
    until(lambda: "513 to 2048" in total.contexts)
    assert total.templates[OWN].rounds == before
    assert total.templates[NO_TEMPLATE].rounds > 0
    text = httpx.get(serving.url + "/metrics").text
    assert 'fledge_spec_decode_template_num_drafts_total{model_name="tiny",template="default"' in text
    assert "\nvllm:spec_decode_num_drafts_total" in text
    assert "python_info 1" not in text  # both have it
    data = client.get("/dashboard/data").json()
    assert data["tiles"]["speed_up"] is None
    assert not data["server"]["switchable"]  # the page's chat has no "off"
    assert "vLLM does not say what its rounds and its plain steps cost" in data["findings"][0]["text"]
    assert {one["name"] for one in data["contexts"]} == {"up to 512", "513 to 2048"}


def swap(serving: Serving, model: str, key: str = "admin") -> httpx.Response:
    path, headers = serving.url + "/admin/drafter", {"Authorization": f"Bearer {key}"}
    return httpx.post(path, json={"model": model}, headers=headers, timeout=20)


def test_another_drafter_is_checked_loaded_by_vllm_and_counted_from_then_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(model: str) -> Path:
        if model == "wrong":
            raise SwapRefusedError("wrong: it is another target's")
        return tmp_path / model

    more = {"reload": DrafterReload("secret", check)}
    proxy = make_proxy(monkeypatch, tmp_path, more=more, admin_api_keys=("admin",))
    with Serving(proxy) as serving:
        assert swap(serving, "new", "nobody").status_code == 401
        refused = swap(serving, "wrong")
        assert (refused.status_code, refused.json()["error"]["message"]) == (409, "wrong: it is another target's")
        httpx.post(serving.url + "/v1/completions", json={"prompt": [1], "max_tokens": 10})
        until(lambda: proxy.metrics.stats.acceptance.rounds)
        done = swap(serving, "new")
        assert (done.status_code, done.json()["drafter"], done.json()["previous"]) == (200, "new", "nowhere")
        asked = proxy.engine.process.client.get_json("/argv")
        assert asked["drafter"] == str(tmp_path / "new")
        httpx.get(serving.url + "/metrics")
        assert proxy.metrics.stats.acceptance.rounds == 0  # those of the old one are not its own
        damaged = swap(serving, "damaged")
        assert (damaged.status_code, damaged.json()["error"]["code"]) == (409, "drafter_refused")
        assert "vLLM did not load it: ValueError: damaged; start the server with it" in damaged.text
        assert proxy.metrics.drafter == "new"
        assert httpx.post(serving.url + "/fledge/drafter", json={"directory": "x"}).status_code == 404
        text = httpx.get(serving.url + "/metrics").text
        assert 'fledge_drafter_swaps_total{model_name="tiny",outcome="refused"} 2.0' in text


def test_a_drafter_that_cannot_be_exchanged_is_a_409_in_words(serving: Serving) -> None:
    answer = swap(serving, "new")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "drafter_refused")
    assert answer.json()["error"]["message"].startswith("this vLLM has no EAGLE drafter to exchange")


def test_the_speed_up_is_estimated_by_what_was_measured_of_the_pair(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    points = [
        TunePoint(concurrency=1, depth=0, tokens_per_second=100.0, acceptance_length=None),
        TunePoint(concurrency=1, depth=3, tokens_per_second=200.0, acceptance_length=3.0),
    ]
    more = {"speculation": {"num_speculative_tokens": 3}, "tuning": VllmTuning(points=points)}
    proxy = make_proxy(monkeypatch, tmp_path, more=more)
    with Serving(proxy) as serving:
        httpx.post(serving.url + "/v1/completions", json={"prompt": [1], "max_tokens": 31})
        httpx.get(serving.url + "/metrics")
        data = httpx.get(serving.url + "/dashboard/data").json()
        length = proxy.metrics.stats.acceptance.acceptance_length
        assert length is not None
        assert 2 < length < 4
        assert data["tiles"]["speed_up"] == pytest.approx(length / 1.5)  # a round costs 15 ms, a plain step 10
        assert f"{length / 1.5:.2f}x as fast as without" in data["findings"][0]["text"]


def test_a_client_that_goes_ends_the_request_at_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("fledge").propagate = True
    proxy = make_proxy(monkeypatch, tmp_path, token_seconds=0.05, max_queue=0, request_timeout=4.0)
    long = {"prompt": [1], "max_tokens": 400, "stream": True}
    with Serving(proxy) as serving, caplog.at_level(logging.INFO, "fledge.request"):
        path = serving.url + "/v1/completions"
        with httpx.stream("POST", path, json=long) as stream:
            parts = stream.iter_bytes()
            next(parts)
            busy = httpx.post(path, json=long)  # one runs, none may wait
            assert (busy.status_code, busy.json()["error"]["code"]) == (429, "queue_full")
        vllm = proxy.engine.process.client
        until(lambda: not proxy.engine.active and "running 0" in vllm.get("/metrics").decode())
        assert [one.fields["status"] for one in caplog.records if hasattr(one, "fields")] == [429, 499]
        slow = httpx.post(path, json=long)  # takes longer than a request may
        assert '"code":"timeout"' in slow.text.splitlines()[-4]


def test_vllms_death_ends_streams_in_words_and_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("fledge").propagate = True
    proxy = make_proxy(monkeypatch, tmp_path, die_after=2, detailed=False)
    with Serving(proxy) as serving:
        answer = httpx.post(serving.url + "/v1/completions", json={"prompt": [1], "stream": True})
        assert "vLLM has stopped working; see the server's log" in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        until(lambda: serving.server.should_exit)
        assert serving.server.exit_status == 1
    (said,) = [one.message for one in caplog.records if one.levelname == "CRITICAL"]
    assert said.endswith("(by the system, if memory ran out): torch.OutOfMemoryError: CUDA out of memory")


def test_draining_lets_streams_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    proxy = make_proxy(monkeypatch, tmp_path, token_seconds=0.1)
    body = {"prompt": [1], "max_tokens": 12, "stream": True}
    with Serving(proxy) as serving:
        path = serving.url + "/v1/completions"
        with httpx.stream("POST", path, json=body) as stream:
            parts = stream.iter_text()
            first = next(parts)
            serving.server.handle_exit(15, None)
            late = httpx.post(path, json=body)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
            assert (first + "".join(parts)).endswith("data: [DONE]\n\n")
    assert serving.server.exit_status == 0
    assert not proxy.engine.process.is_alive


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_only_the_event_that_we_asked_for_is_kept(cut: int) -> None:
    events = [
        b'data: {"choices":[{"text":"say \\"usage\\":{","finish_reason":null}]}\n\n',
        b'data: {"choices":[{"text":"x","finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2},"metrics":{"speculative_decoding":'
        b'{"per_step_drafted":[3,2],"per_step_accepted":[1,0]}}}\n\n',
        b"data: [DONE]\n\n",
    ]
    whole = b"".join(events)
    parts = [whole[i : i + cut] for i in range(0, len(whole), cut)]
    reader = ResponseReader(ProxiedRequest(b"", hides_usage=True))
    assert b"".join([*map(reader.read_part, parts), reader.rest]) == b"".join((*events[:2], events[3]))
    assert reader.finish_reasons == ["stop"]
    assert [tuple(record) for record in reader.metrics.rounds] == [(4, 3, 1), (6, 2, 0)]
    plain = ResponseReader(ProxiedRequest(b""))
    assert b"".join(map(plain.read_part, parts)) == whole
    assert plain.output_tokens == 2


def test_requests_are_read_but_not_changed() -> None:
    def read(body: bytes, path: str = "/v1/completions", *, reports_rounds: bool = True) -> ProxiedRequest:
        return read_request(path, body, template=OWN, reports_rounds=reports_rounds)

    for body in (b"{", b"[]", b'{"stream": 3}', b'{"stream": true, "stream_options": null}', b'{"n": 2}'):
        assert read(body).body == body
    stream = b'{"stream": true, "x": 1.0} \n'
    assert json.loads(read(stream).body) == {"stream": True, "x": 1.0, "stream_options": {"include_usage": True}}
    assert read(stream, "/v1/responses").body == read(stream, reports_rounds=False).body == stream
    chat = read(b'{"chat_template": "x", "messages": [{"content": "\xd0\xb4\xd0\xb0"}]}', "/v1/chat/completions")
    assert (chat.traits.template.name, chat.traits.script, chat.traits.temperature) == ("client", "Cyrillic", 1.0)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-1", b"1" + b"0" * 400, b'"1"'])
def test_odd_numbers_do_not_reach_the_statistics(number: bytes) -> None:
    body = b'{"temperature": ' + number + b', "n": ' + number + b"}"
    read = read_request("/v1/completions", body, template=OWN, reports_rounds=True)
    assert (read.body, read.traits.temperature, read.answers) == (body, 1.0, 1)


def test_dense_json_is_passed_on_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fledge.server.proxied_requests.jiter.from_json", lambda _body: pytest.fail("it was parsed"))
    body = b'{"stream":true,"x":[' + b"[]," * 20_000 + b"[]]}"
    assert read_request("/v1/completions", body, template=OWN, reports_rounds=True) == ProxiedRequest(body)


def test_a_vllm_that_does_not_answer_is_a_408(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    proxy = make_proxy(monkeypatch, tmp_path, request_timeout=0.2)
    with Serving(proxy) as serving:
        with monkeypatch.context() as patch:
            patch.setattr(proxy.engine, "fetch", lambda *_request: asyncio.sleep(60))
            answer = httpx.get(serving.url + "/v1/models", timeout=20)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
