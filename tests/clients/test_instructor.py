"""instructor: validated forms by tools and by JSON schema, whole and as they come."""

import pytest

from tests.clients.cases import HELLO, City
from tests.clients.conftest import Server

instructor = pytest.importorskip("instructor", reason="instructor is not installed (make test-clients)")
openai = pytest.importorskip("openai")
MODES = ("TOOLS", "JSON_SCHEMA")  # plain JSON leaves the form to the model, and this one is too small for it


@pytest.fixture(name="client", params=MODES)
def _client(request: pytest.FixtureRequest, server: Server):
    client = openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0, timeout=60)
    return instructor.from_openai(client, mode=instructor.Mode[request.param])


def test_a_form(client, server: Server) -> None:
    fields = {"model": server.model, "messages": HELLO, "temperature": 0, "max_tokens": 96, "max_retries": 1}
    assert isinstance(client.chat.completions.create(**fields, response_model=City), City)


def test_a_form_as_it_comes(client, server: Server) -> None:
    fields = {"model": server.model, "messages": HELLO, "temperature": 0, "max_tokens": 96}
    *_, last = client.chat.completions.create_partial(**fields, response_model=City)
    City.model_validate(last.model_dump())
