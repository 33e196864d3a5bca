"""Pictures of made-up results: which there are, and what their files are like."""

import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from fledge.drift.perturb import UNPERTURBED
from fledge.drift.plots import charts
from fledge.report.charts import save_png, to_svg
from tests.unit.drift.drift_cases import drift_result
from tests.unit.drift.report_cases import counts, made_up, with_detail

OF_ALL = {
    "recent-attention",
    "sink-attention",
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


def by_name(found):
    return {chart.name: chart.figure for chart in found}


def test_lines_are_what_was_measured_at_each_depth():
    suite, results = made_up({"a3": {}, "b3.1": {}}, recent={"a3": (0.0, 0.1, 0.6), "b3.1": (0.0, 0.1)})
    base = {name: with_detail(results[name, UNPERTURBED]) for name in suite.names}
    found = by_name(charts(suite, base))
    figures = {
        "recent-attention": lambda one: one.attention.recent,
        "sink-attention": lambda one: one.attention.mass["sink"],
        "feature-growth": lambda one: one.feature_growth,
        "hidden-growth": lambda one: one.hidden_growth,
        "feature-cosine": lambda one: one.feature_cosine,
        "acceptance": lambda one: one.acceptance,
        "conditional-acceptance": lambda one: one.conditional_acceptance,
        "calibration-error": lambda one: one.calibration.error,
    }
    for name, figure in figures.items():
        (axes,) = found[name].axes
        lines = {line.get_label(): line for line in axes.get_lines()}
        for title, result in zip(("EAGLE-3", "EAGLE-3.1"), base.values(), strict=True):
            assert lines[title].get_xdata().tolist() == [one.depth for one in result.by_depth]
            assert lines[title].get_ydata().tolist() == pytest.approx([figure(one) for one in result.by_depth])
    # Intervals are drawn for shares and rates alone, one band for each drafter.
    assert {name: len(found[name].axes[0].collections) for name in figures} == {
        name: 2 if name.endswith(("acceptance", "attention")) else 0 for name in figures
    }
    assert found["hidden-growth"].axes[0].get_ylim()[1] > 3  # the last depth's, beyond the usual 2
    assert found["acceptance"].axes[0].get_ylim() == (0, 1.02)


def test_a_depth_that_few_drafts_reached_has_no_calibration_error():
    suite, results = made_up()
    result = with_detail(results["drafter", UNPERTURBED])
    few = replace(result, by_depth=(*result.by_depth[:2], replace(result.by_depth[2], reached=9)))
    (line,) = (
        one
        for one in by_name(charts(suite, {"drafter": few}))["calibration-error"].axes[0].get_lines()
        if one.get_label() == "EAGLE-3"
    )
    assert [math.isnan(value) for value in line.get_ydata()] == [False, False, True]


def test_shares_of_attention_layers_and_heads():
    result = with_detail(drift_result(counts(10)))
    found = by_name(charts(made_up()[0], {"drafter": result}))
    texts = [text.get_text() for text in found["heat-map-1"].axes[0].texts]
    # Rows from the top: first token, user, own drafts; a column for each of three depths.
    assert texts == ["65", "45", "15", "25", "25", "25", "10", "30", "60"]
    assert [label.get_text() for label in found["heat-map-1"].axes[0].get_yticklabels()] == [
        "first token",
        "user",
        "own drafts",
    ]
    labels = [text.get_text() for text in found["attention-1"].legends[0].get_texts()]
    assert sorted(labels) == sorted(["own drafts", "user", "first token", "own drafts if even"])
    heads = [axes for axes in found["heads-1"].axes if axes.images]
    assert [axes.get_title() for axes in heads] == ["recent tokens", "prompt", "first token"]
    assert [axes.images[0].get_array().shape for axes in heads] == [(4, 3)] * 3
    assert heads[0].images[0].get_array()[0].tolist() == pytest.approx([0.1, 0.3, 0.6])
    bars = found["aux-layers"].axes[0].patches
    assert [bar.get_width() for bar in bars] == pytest.approx([0.1, 0.2, 0.7])


def test_the_forest_has_ratios_with_their_intervals_and_leaves_out_what_was_skipped():
    runs = {"template:plain": 8, "pad:64k:before": "too long", "json": 16}
    suite, results = made_up({"a3": runs, "b3.1": runs})
    figure = by_name(charts(suite, {name: results[name, UNPERTURBED] for name in suite.names}))["perturbations"]
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(runs)
    for name, bars in zip(suite.names, axes.containers, strict=True):
        ratios = [suite.cell(name, perturbation).compared for perturbation in runs]
        points, _, (ends,) = bars.lines
        assert points.get_xdata()[[0, 2]].tolist() == [ratios[0].ratio.value, ratios[2].ratio.value]
        assert math.isnan(points.get_xdata()[1])
        low, high = ends.get_segments()[0][:, 0]
        assert (low, high) == pytest.approx((ratios[0].ratio.low, ratios[0].ratio.high))


def test_confidence_is_drawn_against_what_is_right():
    (_, line, *_) = by_name(drawn())["reliability"].axes[0].get_lines()
    assert line.get_xdata().tolist() == pytest.approx([i / 10 + 0.05 for i in range(1, 10)])  # the first bin is empty
    assert line.get_ydata().tolist() == pytest.approx([i / 10 for i in range(1, 10)])


def test_one_depth_can_be_drawn(tmp_path):
    result = with_detail(drift_result(counts(10), recent=(0.0,)))
    suite, _ = made_up()
    found = charts(suite, {"drafter": result})
    for chart in found:
        save_png(chart.figure, tmp_path / f"{chart.name}.png", chart.title)
    assert {path.stem for path in tmp_path.iterdir()} == {"attention-1", "heat-map-1", "heads-1"} | OF_ALL
    figures = by_name(found)
    assert figures["attention-1"].axes[0].get_xlim() == (0.6, 1.4)  # a stack of one depth has some width all the same
    (line,) = (one for one in figures["acceptance"].axes[0].get_lines() if one.get_label() == "EAGLE-3")
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1], [0.5])


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
    svg = to_svg(by_name(drawn({"a3": {}, "b3.1": {}}))["acceptance"], "acceptance", "")
    assert "var(--series-0, #d55e00)" in svg
    assert "var(--series-1, #0072b2)" in svg
    assert "var(--muted" in svg


def test_the_trained_depth_is_marked():
    marked, plain = (to_svg(by_name(drawn(detail=detail))["acceptance"], "x", "") for detail in (True, False))
    assert "trained to here" in marked
    assert "trained to here" not in plain


def test_pictures_are_written_whole(tmp_path):
    chart = drawn()[0]
    save_png(chart.figure, tmp_path / "x.png", "A title")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("drafters", [1, 7])
def test_every_drafter_has_a_line_of_its_own(drafters):
    found = by_name(drawn({f"drafter-with-quite-a-long-name-{i}": {} for i in range(drafters)}))
    assert set(found) >= OF_ALL
    labels = [text.get_text() for text in found["acceptance"].legends[0].get_texts()]
    assert len(set(labels)) == drafters
    lines = [line for line in found["acceptance"].axes[0].get_lines() if line.get_label() in labels]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == drafters
