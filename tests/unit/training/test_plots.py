"""The picture of a run. What it shows was looked at by people; this says that it is drawn from what the log has."""

from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from fledge.training.stages.fit import plot_training


def records(count: int, drift: bool = True) -> list[dict[str, Any]]:
    made, depth = [], 4
    for i in range(1, count + 1):
        record: dict[str, Any] = {
            "step": 50 * i,
            "loss": 8.0 / i**0.3,
            "simulated_acceptance_length": 1 + 2 * (1 - 1 / i),
            "accuracy_by_depth": [0.8 - 0.1 * k - 0.5 / i for k in range(depth)],
        }
        if drift and i % 2 == 0:
            for name in ("hidden_rms", "own_attention", "sink_attention"):
                record[f"{name}_by_depth"] = [0.1 * (k + 1) for k in range(depth)]
        made.append(record)
    return made


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path, values: list[dict[str, Any]]) -> Figure:
    figures: list[Figure] = []
    save = Figure.savefig

    def kept(self: Figure, *arguments: Any, **named: Any) -> None:
        figures.append(self)
        save(self, *arguments, **named)

    monkeypatch.setattr(Figure, "savefig", kept)
    plot_training(values, path, title="a run")
    return figures[0]


def test_every_depth_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(monkeypatch, tmp_path / "training.png", records(8))
    lines = {panel.get_title(loc="left"): panel.get_lines() for panel in figure.axes}
    assert [len(each) for each in lines.values()] == [1, 4, 2, 4, 4, 4]  # the acceptance length has a bound, too
    first = lines["Accuracy"][0]
    assert list(first.get_xdata()) == [50 * i for i in range(1, 9)]
    assert list(first.get_ydata()) == [record["accuracy_by_depth"][0] for record in records(8)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["1", "2", "3", "4"]
    assert matplotlib.image.imread(tmp_path / "training.png").shape[1] > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["training.png"]


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = records(1, drift=False)
    values[0] |= {"loss": None, "accuracy_by_depth": [0.5, None, None, None]}
    figure = drawn(monkeypatch, tmp_path / "training.png", values)
    said = [text.get_text() for panel in figure.axes for text in panel.texts]
    assert said.count("not recorded") == 4
