"""Pictures of made-up results: which there are, and what their files are like."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from fledge.drift.perturb import UNPERTURBED
from fledge.drift.plots import charts, segments_of
from fledge.report.charts import save_png, to_svg
from tests.unit.drift.drift_cases import drift_result
from tests.unit.drift.report_cases import counts, made_up, with_detail

OF_ALL = {
    "feature-growth",
    "hidden-growth",
    "feature-cosine",
    "aux-layers",
    "acceptance",
    "conditional-acceptance",
    "reliability",
    "calibration-error",
}


def drawn(accepted=None, *, detail=True):
    suite, results = made_up(accepted)
    base = {name: results[name, UNPERTURBED] for name in suite.names}
    return charts(suite, {name: with_detail(result) if detail else result for name, result in base.items()})


def test_a_picture_of_each_thing_measured():
    names = {chart.name for chart in drawn({"a3": {"template:plain": 8}, "b3.1": {"template:plain": 12}})}
    of_one = {f"{what}-{i}" for what in ("attention", "heat-map", "heads") for i in (1, 2)}
    assert names == of_one | OF_ALL | {"perturbations"}


def test_what_was_not_measured_has_no_picture():
    names = {chart.name for chart in drawn(detail=False)}
    assert names == {"attention-1", "heat-map-1"} | OF_ALL - {"feature-cosine", "reliability"}
    suite, results = made_up()
    nothing = replace(results["drafter", UNPERTURBED], by_depth=())
    assert charts(suite, {"drafter": nothing}) == []


def test_one_depth_can_be_drawn(tmp_path):
    result = with_detail(drift_result(counts(10), own=(0.0,)))
    suite, _ = made_up()
    for chart in charts(suite, {"drafter": result}):
        save_png(chart.figure, tmp_path / "one.png", chart.title)


def test_svg_is_well_formed_and_its_ids_are_its_own():
    seen: set[str] = set()
    for chart in drawn({"a3": {}, "b3.1": {}}):
        svg = to_svg(chart.figure, chart.name, 'a "label" <b>')
        root = ElementTree.fromstring(svg)
        assert root.get("aria-label") == 'a "label" <b>'
        ids = re.findall(r' id="([^"]*)"', svg)
        referred = set(re.findall(r'(?:url\(#|href="#)([^)"]*)', svg))
        assert referred <= set(ids)
        assert not seen & set(ids)
        assert len(ids) == len(set(ids))
        seen |= set(ids)
        assert "http" not in svg
        assert len(svg) < 150_000


def test_colours_follow_the_page():
    by_name = {chart.name: to_svg(chart.figure, chart.name, "") for chart in drawn({"a3": {}, "b3.1": {}})}
    assert "var(--series-0, #d55e00)" in by_name["acceptance"]
    assert "var(--series-1, #0072b2)" in by_name["acceptance"]
    assert "var(--muted" in by_name["acceptance"]


def test_the_trained_depth_is_marked():
    by_name = {chart.name: to_svg(chart.figure, chart.name, "") for chart in drawn()}
    assert "trained to here" in by_name["acceptance"]
    assert "trained to here" not in {c.name: to_svg(c.figure, c.name, "") for c in drawn(detail=False)}["acceptance"]


def test_only_classes_that_occur_are_drawn():
    assert segments_of(drift_result(counts(10))) == ["drafted", "user", "sink"]


def test_pictures_are_written_whole(tmp_path):
    chart = drawn()[0]
    save_png(chart.figure, tmp_path / "x.png", "A title")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("drafters", [1, 7])
def test_any_number_of_drafters(drafters):
    found = drawn({f"drafter-with-quite-a-long-name-{i}": {} for i in range(drafters)})
    assert {chart.name for chart in found} >= OF_ALL
