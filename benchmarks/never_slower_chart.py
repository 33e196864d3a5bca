"""Draw what `never_slower.py` measured: for every cell the fixed arms, and the controller, over no drafting.

`python benchmarks/never_slower_chart.py never-slower.svg "8B"=ns8.json "1B"=ns1.json`
"""

import json
import sys
from itertools import product
from pathlib import Path
from statistics import mean

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt


def main(out: Path, named: list[str]) -> None:
    plt.rcParams |= {"font.size": 9, "svg.hashsalt": "fledge", "svg.fonttype": "none"}
    figure, rows = plt.subplots(len(named), 4, figsize=(11, 2.9 * len(named)), squeeze=False, layout="constrained")
    for axes, (title, file) in zip(rows, (one.split("=") for one in named), strict=True):
        cells = json.loads(Path(file).read_text())["cells"]
        panels = product((0.0, 1.0), ("humaneval", "mt_bench"))
        for panel, (temperature, workload) in zip(axes, panels, strict=True):
            own = [one for one in cells if (one["temperature"], one["workload"]) == (temperature, workload)]
            for place, cell in enumerate(own):
                speeds = {name: mean(values) / mean(cell["speeds"]["none"]) for name, values in cell["speeds"].items()}
                chosen = speeds.pop("adaptive")
                panel.scatter([place] * len(speeds), list(speeds.values()), s=14, color="#9aa3ad", zorder=2)
                panel.scatter([place], [chosen], s=46, marker="D", color="#c2410c", zorder=3)
            panel.axhline(1, color="#334155", linewidth=0.8)
            panel.set_xticks(range(len(own)), [str(one["concurrency"]) for one in own])
            panel.set_title(f"{title}, {workload}, T = {temperature:g}", fontsize=9)
            panel.set_xlabel("requests in flight")
            panel.grid(axis="y", linewidth=0.3)
        axes[0].set_ylabel("tokens per second\nover no drafting")
    figure.suptitle("The controller (orange) beside every fixed choice (grey: none and chains, argmax or drawn)")
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
