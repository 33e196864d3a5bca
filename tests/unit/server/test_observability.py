"""The Grafana dashboard and the page on metrics, held against what is really exposed."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from prometheus_client.parser import text_string_to_metric_families

from fledge.decoding.drafter_statistics import BINS, StateGrowth
from fledge.engine.admission import DraftCalibration
from fledge.engine.arms import Arm
from fledge.engine.controller import DepthChoice
from fledge.evaluation.baseline import Baseline, BaselineCell
from fledge.server.metrics import Metrics
from tests.page_service import EngineFeed

DOCS = Path(__file__).parents[3] / "docs"


MEASURED = {"growth_by_depth": (1.0,), "reliability": ((1, 0.05, 0),)}
RATES = BaselineCell(temperature=0.0, depth=1, rounds=1, acceptance_length=1.5, rate_by_depth=(0.5,), **MEASURED)
BASELINE = Baseline(cells=(RATES,), measured_on=("mt_bench",), fledge_version="1", date="2026-11-16")


def _exposed_names() -> set[str]:
    metrics = Metrics(model_name="m", has_drafter=True, baseline=BASELINE)
    feed = EngineFeed(metrics)
    for _ in range(5):
        feed.step(depth=3)
        feed.step(depth=0, accepted=0)
    feed.tell(choice=DepthChoice(arm=Arm(3), batch=4, tokens=2.0, cost=1.5, shown=Arm(3), reason="best"))
    drafts = np.full((2, BINS, 3), 1.0)
    calibration = DraftCalibration(counts=np.zeros((3, BINS, 2), dtype=np.int64), by_confidence=drafts)
    feed.tell(state_growth=StateGrowth().plus([1.0, 1.1, 1.2]), calibration=calibration)
    feed.finished()
    metrics.on_rejected("queue_full")
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name for family in families for sample in family.samples}


def _dashboard() -> dict[str, Any]:
    return json.loads((DOCS / "grafana-dashboard.json").read_text())


def _panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [inner for panel in dashboard["panels"] for inner in (panel, *panel.get("panels", []))]


def test_the_grafana_dashboard_asks_only_for_metrics_that_exist():
    dashboard = _dashboard()
    queries = [target["expr"] for panel in _panels(dashboard) for target in panel.get("targets", [])]
    queries += [str(variable.get("definition", "")) for variable in dashboard["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"fledge_\w+", query)}
    assert len(asked) > 20
    assert asked <= _exposed_names()


def test_the_grafana_dashboard_shows_every_metric():
    dashboard = _dashboard()
    queries = " ".join(target["expr"] for panel in _panels(dashboard) for target in panel.get("targets", []))
    exposed = {re.sub(r"_(bucket|sum|count)$", "", name) for name in _exposed_names() if name.startswith("fledge_")}
    missing = {name for name in exposed if name not in queries}
    assert missing == set()


def test_the_grafana_dashboard_is_well_formed():
    dashboard = _dashboard()
    panels = _panels(dashboard)
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names == ["datasource", "model_name"]


def test_the_alerts_of_observability_md_ask_only_for_metrics_that_exist():
    (rules,) = re.findall(r"(?ms)^```yaml\n(groups:.*?)^```", (DOCS / "observability.md").read_text())
    queries = [rule["expr"] for group in yaml.safe_load(rules)["groups"] for rule in group["rules"]]
    asked = {name for query in queries for name in re.findall(r"fledge_\w+", query)}
    assert "fledge_spec_decode_acceptance_drift" in asked
    assert asked <= _exposed_names()


def test_observability_md_documents_every_metric_and_no_other():
    text = (DOCS / "observability.md").read_text()
    documented = set(re.findall(r"`fledge_(\w+?)(?:\{[^`]*\})?`", text))
    exposed = {
        re.sub(r"_(bucket|sum|count)$", "", name).removeprefix("fledge_").removesuffix("_total")
        for name in _exposed_names()
        if name.startswith("fledge_")
    }
    assert {name.removesuffix("_total") for name in documented} == exposed
