"""Requests made up from the server's own OpenAPI schema: none of them may make it fail."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.serving import Serving, make_service

EXAMPLES = int(os.environ.get("FLEDGE_TEST_SCHEMA_EXAMPLES", "25"))


@pytest.fixture(name="serving", scope="module")
def _serving() -> Iterator[Serving]:
    with Serving(make_service(request_timeout=20.0)) as serving:
        yield serving
        serving.until_idle()


@pytest.fixture(name="api", scope="module")
def _api(serving: Serving) -> Any:
    return schemathesis.openapi.from_url(f"{serving.url}/openapi.json")


OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/load"),
    ("GET", "/metrics"),
    ("GET", "/tokenizer_info"),
    ("POST", "/v1/responses"),
    ("POST", "/admin/drafter"),  # without a key
]


def test_every_operation_is_tried(api: Any) -> None:
    found = [(result.ok().method.upper(), result.ok().path) for result in api.get_all_operations()]
    assert sorted(found) == sorted(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_no_request_makes_the_server_fail(api: Any, method: str, path: str, mode: Any) -> None:
    """`negative` requests break the schema on purpose."""
    examples = EXAMPLES if method == "POST" else 5

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate),
    )
    @given(api[path][method].as_strategy(generation_mode=mode))
    def holds(case: Any) -> None:
        if isinstance(case.body, dict) and mode is schemathesis.GenerationMode.POSITIVE:
            _make_plausible(case.body)
        response = case.call(timeout=30)
        statuses[response.status_code] += 1
        assert response.status_code < 500, f"{response.status_code}: {response.text[:500]}"
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    statuses: Counter[int] = Counter()
    try:
        holds()
    except Unsatisfiable:
        assert mode is schemathesis.GenerationMode.NEGATIVE  # nothing in the request that could be wrong
    print(method, path, mode.value, dict(statuses))


def _make_plausible(body: dict[str, Any]) -> None:
    """Get past what nearly every made-up request stumbles over, to what the other fields do."""
    body.pop("model", None)
    body["max_tokens"] = 4
    for name in ("response_format", "structured_outputs", "guided_json", "guided_grammar", "guided_regex", "tools"):
        if name in body and len(json.dumps(body[name])) % 2:
            del body[name]
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": f"Hello {len(body)}"}]
    if "prompt" in body and "tokens" not in body and not isinstance(body["prompt"], str):
        body["prompt"] = "Hello"


def test_the_server_is_as_it_was(serving: Serving) -> None:
    assert serving.service.engine.is_healthy
    assert serving.in_engine(lambda engine: engine.stats().failed_steps) == 0
