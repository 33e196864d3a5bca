"""Real Prometheus (Debian: `apt-get install prometheus`) scrapes a running server and answers the Grafana dashboard."""

import itertools
import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import free_port
from tests.serving import MODEL, Serving

DOCS = Path(__file__).parents[2] / "docs"
SCRAPE_SECONDS = 0.25
RATE_INTERVAL = "3s"  # what Grafana makes of this scrape interval is shorter than a burst of requests on a busy machine
CONFIG = {
    "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
    "scrape_configs": [{"job_name": "fledge", "static_configs": [{"targets": []}]}],
}

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="Prometheus is not installed"
)


@pytest.fixture(name="serving", scope="module")
def _serving() -> Iterator[Serving]:
    with Serving() as serving:
        yield serving


@pytest.fixture(name="prometheus", scope="module")
def _prometheus(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    directory = tmp_path_factory.mktemp("prometheus")
    config: Any = json.loads(json.dumps(CONFIG))
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{serving.port}"]
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=error"]
    process = subprocess.Popen([*command, f"--web.listen-address={address}"], cwd=directory)
    try:
        with httpx.Client(base_url=f"http://{address}/api/v1", timeout=10) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


def send_requests(serving: Serving) -> None:
    """One answer with speculation and one without, so that their costs can be compared."""
    for enabled in (True, False):
        body = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "speculation": {"enabled": enabled}}
        httpx.post(f"{serving.url}/v1/completions", json=body, timeout=30).raise_for_status()


def values(prometheus: httpx.Client, query: str) -> list[float]:
    """Return the finite values that a query has now."""
    answer = prometheus.get("/query", params={"query": query})
    assert answer.status_code == 200, f"{query}: {answer.text}"
    found = [float(series["value"][1]) for series in answer.json()["data"]["result"]]
    return [value for value in found if math.isfinite(value)]


def dashboard_queries() -> list[str]:
    """Every query of the dashboard and the acceptance length of observability.md, as Grafana would send them."""
    panels = json.loads((DOCS / "grafana-dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    assert len(queries) > 40
    queries += re.findall(r"^1 \+ rate\(.*$", (DOCS / "observability.md").read_text(), flags=re.MULTILINE)
    variables = {"$model_name": MODEL, "$__rate_interval": RATE_INTERVAL, "$__range": "1m"}
    for name, value in variables.items():
        queries = [query.replace(name, value) for query in queries]
    assert not [query for query in queries if "$" in query]
    return list(dict.fromkeys(queries))


def test_promtool_finds_nothing_to_complain_about(serving: Serving) -> None:
    send_requests(serving)
    text = httpx.get(f"{serving.url}/metrics").text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_promtool_accepts_the_alerts_of_the_documentation(tmp_path: Path) -> None:
    (rules,) = re.findall(r"(?ms)^```yaml\n(groups:.*?)^```", (DOCS / "observability.md").read_text())
    (tmp_path / "alerts.yml").write_text(rules)
    command = ["promtool", "check", "rules", str(tmp_path / "alerts.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 rules found" in done.stdout


def test_every_query_of_the_dashboard_returns_data(serving: Serving, prometheus: httpx.Client) -> None:
    missing, deadline = dashboard_queries(), time.monotonic() + 30
    for attempt in itertools.count():
        send_requests(serving)
        time.sleep(SCRAPE_SECONDS)
        if attempt < 4:  # it starts, and a rate needs two scrapes
            continue
        missing = [query for query in missing if not values(prometheus, query)]
        if not missing or time.monotonic() > deadline:
            break
    assert missing == []
    found = prometheus.get("/label/model_name/values", params={"match[]": "fledge_server_info"}).json()["data"]
    assert found == [MODEL]


def test_what_prometheus_stores_is_what_the_engine_counted(serving: Serving, prometheus: httpx.Client) -> None:
    send_requests(serving)
    serving.until_idle()
    counted = serving.in_engine(lambda engine: engine.stats())
    wanted = {
        "fledge_generation_tokens_total": counted.output_tokens,
        "fledge_spec_decode_num_drafts_total": counted.acceptance.rounds,
        "sum(fledge_spec_decode_num_draft_tokens_per_pos_total)": sum(counted.acceptance.drafted_by_depth),
        "fledge_num_requests_running": 0,
    }
    deadline = time.monotonic() + 10
    while (found := {query: sum(values(prometheus, query)) for query in wanted}) != wanted:
        assert time.monotonic() < deadline, f"{found}, not {wanted}"
        time.sleep(SCRAPE_SECONDS)
