"""Drafters at many depths: pictures show what matters of them, and nothing is said ten times."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from fledge.bench.charts import charts, style
from fledge.bench.report import BenchReport, print_results
from fledge.bench.summary import Summary, Sweep, summaries
from fledge.bench.verdict import Reference, disappointments, leaders, overall, verdicts, warnings
from fledge.evaluation.results import Contender, Load, Results
from fledge.report.charts import INK, PAPER
from tests.bench_results import PLAIN, make_eval_results, make_results
from tests.unit.bench.depth_cases import SPEEDS, make_contender, many_depths

SHALLOW = {name: {k: speeds for k, speeds in depths.items() if k != 5} for name, depths in SPEEDS.items()}
PAPERS = (Reference.parse("Paper:1=2.03,16=1.66"),)


def part_of(results: Results) -> Summary:
    (part,) = summaries([results])
    return part


def picture(part: Summary, name: str) -> Figure:
    return next(chart.figure for chart in charts(part, PAPERS) if chart.name == name)


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def written_at_points(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def heights(results: Results) -> dict[str, float]:
    """In inches, of the axes in every picture."""
    found = {}
    for chart in charts(part_of(results), PAPERS):
        chart.figure.draw_without_rendering()
        axes = chart.figure.axes[0]
        found[chart.name] = axes.get_position().height * chart.figure.get_figheight()
    return found


def test_a_legend_never_eats_the_plot():
    few = make_results(contenders=(PLAIN, "a"), workloads=("chat",), concurrencies=(1, 4), repeats=2, prompts=4)
    names = (PLAIN, *(f"a server with a name so long, {number}" for number in range(12)))
    many = make_results(contenders=names, workloads=("chat",), concurrencies=(1, 4), repeats=2, prompts=4)
    alone, crowded = heights(few), heights(many)
    assert alone.keys() == crowded.keys()
    for name, height in crowded.items():
        assert height > 0.85 * alone[name], name


def sweeps(contenders: Sequence[Contender]) -> list[Sweep]:
    return Summary(many_depths(contenders=tuple(contenders), cells=(), baseline=None), None).sweeps


def test_chains_of_one_drafter_are_a_sweep_and_trees_are_not():
    chains = [make_contender("EAGLE-3", depth) for depth in (5, 2, 3)]
    tree = make_contender("EAGLE-3", 4, name="tree", speculation={"num_speculative_tokens": 4, "tree_width": 2})
    twin = make_contender("EAGLE-3", 5, name="twin")
    other = make_contender("EAGLE-3", 4, name="hotter", temperature=1.0)
    server = Contender(name="server", kind="server", target="target")
    found = sweeps([*chains, tree, twin, other, server])
    assert [sweep.title for sweep in found] == ["EAGLE-3", "tree", "twin", "hotter", "server"]
    assert list(found[0].depths.items()) == [("EAGLE-3 K=2", 2), ("EAGLE-3 K=3", 3), ("EAGLE-3 K=5", 5)]
    renamed = [replace(one, name=f"server {number}") for number, one in enumerate(chains)]
    assert [sweep.title for sweep in sweeps(renamed)] == ["eagle-3 (fledge)"]


def test_speed_is_one_line_for_each_drafter_with_its_fastest_depth_at_the_points():
    figure = picture(part_of(many_depths()), "speed-concurrency-1-1")
    assert sorted(legend_of(figure)) == ["EAGLE-3, fastest depth", "EAGLE-3.1, fastest depth", "Paper (reported)"]
    assert written_at_points(figure.axes[0]) == ["K=3", "K=2", "K=5", "K=3"]  # of EAGLE-3 at both loads, then 3.1
    places = [text.get_position()[1] for text in figure.axes[0].texts]
    assert max(places[:2]) < 0 < min(places[2:]), "those of two drafters are on two sides"


@pytest.mark.parametrize("name", ["capacity-concurrency-1-1", "tpot-1-1-1", "acceptance-1-1"])
def test_other_pictures_have_one_line_for_each_drafter_too(name: str):
    found = [label for label in legend_of(picture(part_of(many_depths()), name)) if label != PLAIN]
    assert [label.split()[0].rstrip(",") for label in found] == ["EAGLE-3", "EAGLE-3.1"]


def test_latency_is_that_of_the_depth_that_is_fastest_under_the_load():
    part = part_of(many_depths())
    assert legend_of(picture(part, "tpot-1-1-1")) == [PLAIN, "EAGLE-3 K=3", "EAGLE-3.1 K=5"]
    assert legend_of(picture(part, "tpot-1-1-2")) == [PLAIN, "EAGLE-3 K=2", "EAGLE-3.1 K=3"]


def test_speed_by_depth_has_a_panel_for_each_drafter_and_marks_the_best():
    figure = picture(part_of(many_depths()), "depth-concurrency-1-1")
    assert [axes.get_title() for axes in figure.axes] == ["EAGLE-3", "EAGLE-3.1"]
    rings = [[line.get_xdata()[0] for line in axes.lines if line.get_markersize() == 9] for axes in figure.axes]
    assert rings == [[3, 2], [5, 3]]
    points = [line for line in figure.axes[1].lines if line.get_markersize() == 4]
    full = [line.get_xdata()[0] for line in points if line.get_markerfacecolor() != PAPER]
    assert full == [3, 5, 3]  # at 1 both, which cannot be told apart; at 16 the best alone
    for axes in figure.axes:
        assert sorted(written_at_points(axes)) == ["C=1", "C=16"]
        assert axes.get_ylim() == figure.axes[0].get_ylim()


@pytest.mark.parametrize("baseline", [PLAIN, None])
def test_a_depth_that_is_not_whole_is_never_the_fastest(baseline: str | None):
    results = many_depths(baseline=baseline)
    lost = [
        replace(cell, status="failed", note="it died") if cell.contender == "EAGLE-3 K=3" else cell
        for cell in results.cells
    ]
    part = part_of(replace(results, cells=tuple(lost)))
    sweep = part.depth_sweeps[0]
    assert part.best_depths[sweep, "chat", Load(concurrency=1)].contender == "EAGLE-3 K=5"
    assert legend_of(picture(part, "tpot-1-1-1"))[1] == "EAGLE-3 K=5"


def test_without_a_baseline_speeds_decide():
    part = part_of(many_depths(baseline=None))
    found = [part.best_depths[sweep, "chat", Load(concurrency=1)] for sweep in part.depth_sweeps]
    assert [one.contender for one in found] == ["EAGLE-3 K=3", "EAGLE-3.1 K=5"]
    assert [one.over_baseline for one in found] == [None, None]


def test_with_two_depths_every_contender_has_its_line():
    part = part_of(many_depths(SHALLOW))
    names = [chart.name for chart in charts(part)]
    assert not any(name.startswith("depth") for name in names)
    labels = legend_of(picture(part, "speed-concurrency-1-1"))
    assert [label for label in labels if "K=" in label] == part.challengers
    shapes = [(style(part, name)["marker"], style(part, name)["linestyle"]) for name in part.challengers]
    assert len(set(shapes)) == 4


@pytest.mark.parametrize("speeds", [SPEEDS, SHALLOW])
def test_a_drafter_has_one_colour_and_two_are_told_apart_in_grey(speeds: dict[str, dict[int, dict[int, float]]]):
    part = part_of(many_depths(speeds))
    looks = {name: style(part, name) for name in part.challengers}
    colours = {drafter: {looks[n]["color"] for n in looks if n.startswith(f"{drafter} ")} for drafter in speeds}
    assert all(len(found) == 1 for found in colours.values())
    assert colours["EAGLE-3"] != colours["EAGLE-3.1"]
    assert part.colour("EAGLE-3 K=2") == part.colour("EAGLE-3 K=3") != part.colour("EAGLE-3.1 K=3")
    for one in [name for name in looks if name.startswith("EAGLE-3 ")]:
        for other in [name for name in looks if name.startswith("EAGLE-3.1 ")]:
            assert looks[one]["marker"] != looks[other]["marker"]
            assert looks[one]["linestyle"] != looks[other]["linestyle"]


@pytest.mark.parametrize("baseline", ["EAGLE-3 K=3", "EAGLE-3.1 K=3"])
@pytest.mark.usefixtures("_blank_pictures")
def test_a_baseline_that_drafts_is_drawn_in_ink(tmp_path: Path, baseline: str):
    for results in (many_depths(), make_results(concurrencies=(1,), repeats=2, prompts=4)):
        (part,) = summaries([results], baseline)
        assert baseline not in [name for sweep in part.sweeps for name in sweep.depths]
        assert style(part, baseline)["color"] == style(part, baseline, 0)["color"] == INK
        BenchReport(summaries=(part,), title="x").write(tmp_path / "page.html")
        assert baseline in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_temperatures_of_one_drafter_share_its_colour():
    part = part_of(make_eval_results(workloads=("chat",), prompts=2))
    assert len({part.colour(name) for name in part.contenders}) == 2


def test_different_answers_are_told_once(capsys: pytest.CaptureFixture[str]):
    every = {f"{name} K={depth}": 1 for name, depths in SPEEDS.items() for depth in depths}
    results = many_depths(different={**every, "EAGLE-3 K=2": 3})
    (line,) = warnings(part_of(results))
    # Of each cell's four answers one differs, in two repeats under two loads; of one contender three do.
    expected = (
        f"32 of 96 answers differ from those of {PLAIN} at temperature 0 (EAGLE-3 K=2: 12 of 16; EAGLE-3 K=3: 4 of 16"
    )
    assert line.startswith(f"{expected}; EAGLE-3 K=5: 4 of 16; 3 more contenders). In 16 bits")
    print_results(part_of(results), Console(width=300))
    assert capsys.readouterr().out.count("answers differ") == 1


def test_a_single_contender_that_differs_is_named():
    (line,) = warnings(part_of(many_depths(different={"EAGLE-3 K=2": 1})))
    expected = f"4 of 96 answers differ from those of {PLAIN} at temperature 0 (EAGLE-3 K=2: 4 of 16)."
    assert line.startswith(f"{expected} The others gave the same answers. In 16 bits")


def test_those_who_gave_the_same_answers_are_not_blamed():
    settings = {"temperature": 0.0, "dtype": "float32"}
    results = many_depths(different={"EAGLE-3 K=2": 1, "EAGLE-3.1 K=2": 1}, settings=settings)
    (line,) = warnings(part_of(results))
    named = "(EAGLE-3 K=2: 4 of 16; EAGLE-3.1 K=2: 4 of 16)"
    assert line.endswith(f"temperature 0 {named}. The others gave the same answers.")
    assert line.startswith("8 of 96")


@pytest.mark.usefixtures("_blank_pictures")
def test_the_section_on_answers_has_the_count_of_each_contender(tmp_path: Path):
    part = part_of(many_depths(different={"EAGLE-3 K=2": 3, "EAGLE-3 K=5": 1}))
    BenchReport(summaries=(part,), title="x").write(tmp_path / "page.html")
    section = (tmp_path / "page.html").read_text(encoding="utf-8").split("Same answers</h2>")[1].split("<details>")[0]
    assert section.count("<tr>") == 1 + 6
    assert '<td class="number">16</td><td class="number bad">12</td>' in section


def inflated(results: Results, names: Sequence[str]) -> Results:
    contenders = [replace(one, inflated="8b") if one.name in names else one for one in results.contenders]
    return replace(results, contenders=tuple(contenders))


def test_all_contenders_are_called_that_once():
    results = many_depths()
    everyone = [one.name for one in results.contenders]
    part = part_of(inflated(results, everyone))
    assert warnings(part)[0].startswith("Inflated to the shape 8b: all contenders. They cost")
    text = BenchReport(summaries=(part,), title="x").to_markdown()
    assert "| chat, per user (inflated: 8b) | C=1 | C=16 |" in text
    assert "| acceptance length (inflated: 8b) | chat |" in text
    assert "| EAGLE-3 K=2 | " in text
    assert text.count("(inflated: 8b)") == 2


def test_some_inflated_contenders_are_named():
    part = part_of(inflated(many_depths(), ["EAGLE-3 K=2", "EAGLE-3 K=3"]))
    assert warnings(part)[0].startswith("Inflated to the shape 8b: EAGLE-3 K=2, EAGLE-3 K=3. They cost")
    text = BenchReport(summaries=(part,), title="x").to_markdown()
    assert "| chat, per user | C=1 | C=16 |" in text
    assert "| EAGLE-3 K=2 (inflated: 8b) | " in text
    assert "| EAGLE-3 K=5 | " in text


@pytest.mark.usefixtures("_blank_pictures")
def test_the_best_depth_of_each_drafter_has_a_card_and_the_others_are_folded(tmp_path: Path):
    part = part_of(many_depths())
    assert leaders(part) == ["EAGLE-3.1 K=3", "EAGLE-3 K=2"]  # over all loads
    order = [one.name for one in verdicts(part)]
    assert order[:2] == leaders(part)
    assert sorted(order) == sorted(part.challengers)
    BenchReport(summaries=(part,), title="x").write(tmp_path / "page.html")
    shown, _, folded = (tmp_path / "page.html").read_text(encoding="utf-8").partition("<summary>4 more contenders")
    assert shown.count("<article") == 2
    assert folded.count("<article") == 4


@pytest.mark.usefixtures("_blank_pictures")
def test_with_few_depths_the_four_fastest_have_cards(tmp_path: Path):
    part = part_of(many_depths(SHALLOW))
    BenchReport(summaries=(part,), title="x").write(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("<article") == 4
    assert "more contender" not in text


def test_side_by_side_says_which_drafter_is_ahead_and_names_depths_in_short():
    texts = [sentence.text for sentence in overall(part_of(many_depths()))]
    first = texts[0]
    assert first.startswith("EAGLE-3.1 against EAGLE-3 on chat, each at its fastest depth, in speed per user: 1.1")
    assert "at concurrency 1 (K=5 against K=3)" in first
    assert "at concurrency 16 (K=3 against K=2)" in first
    assert first.endswith("ahead beyond noise at concurrency 1, 16.")
    lengths = [text for text in texts if text.startswith("The acceptance length of")]
    assert len(lengths) == 1
    assert all(f"at K={depth}" in lengths[0] for depth in (2, 3, 5))
    same = {"EAGLE-3": {depth: {1: 1.5} for depth in (2, 3, 5)}}
    fastest = next(sentence.text for sentence in overall(part_of(many_depths(same))) if "Fastest" in sentence.text)
    assert "(not to be told from EAGLE-3 K=" in fastest
    assert fastest.count("EAGLE-3") == 2


def test_a_shortfall_is_told_of_the_fastest_depth_alone():
    below = [one.text for one in disappointments(part_of(many_depths()), PAPERS) if "stays below" in one.text]
    assert len(below) == 2
    assert below[1].startswith("EAGLE-3.1 at its fastest depth on chat stays below what is reported for Paper: 1.79 [")
    assert "(K=5) against 2.03 at concurrency 1" in below[1]
