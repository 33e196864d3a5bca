"""Draw what `beside_vllm.py` measured of loads: for each shape and depth, Fledge over vLLM by requests in flight.

`python benchmarks/beside_chart.py beside.svg beside.jsonl 8B=8b 1B=1b`
"""

import json
import sys
from pathlib import Path
from statistics import geometric_mean

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

KINDS = {0: ("no drafts in either", "#64748b"), 3: ("vLLM: 3 drafts; Fledge: up to 3, as it chooses", "#c2410c")}


def main(out: Path, file: Path, named: list[str]) -> None:
    plt.rcParams |= {"font.size": 9, "svg.hashsalt": "fledge", "svg.fonttype": "none"}
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if "error" not in row]
    figure, axes = plt.subplots(1, len(named), figsize=(4.8 * len(named), 3.2), squeeze=False, layout="constrained")
    for panel, (title, part) in zip(axes[0], (one.split("=") for one in named), strict=True):
        own = [row for row in rows if row["part"] == part]
        concurrencies = sorted({row["C"] for row in own})
        for depth, (label, colour) in KINDS.items():
            for place, concurrency in enumerate(concurrencies):
                cell = [row for row in own if (row["K"], row["C"]) == (depth, concurrency)]
                speed = {(row["engine"], row["repeat"]): row["user_tokens_per_second"] for row in cell}
                both = [repeat for engine, repeat in speed if engine == "fledge" and ("vllm", repeat) in speed]
                ratios = [speed["fledge", repeat] / speed["vllm", repeat] for repeat in both]
                if not ratios:
                    continue
                at, mean = place + (0.2 if depth else -0.2), geometric_mean(ratios)
                panel.bar(at, mean, 0.36, color=colour, label=label if not place else None)
                panel.scatter([at] * len(ratios), ratios, s=9, color="black", zorder=3)
                panel.text(at, 0.04, f"{mean:.2f}", ha="center", color="white", fontsize=8)
        panel.axhline(1, color="#334155", linewidth=0.8)
        panel.set_xticks(range(len(concurrencies)), [str(one) for one in concurrencies])
        panel.set_xlabel("requests in flight")
        panel.set_title(f"at the cost of {title}", fontsize=9)
    axes[0][0].set_ylabel("tokens per second of a user,\nFledge over vLLM 0.26")
    axes[0][0].legend(loc="upper left", fontsize=7.5, frameon=False)
    axes[0][0].set_ylim(0, 2.0)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    except (IndexError, OSError, ValueError) as error:
        sys.exit(f"error: {error}; {(__doc__ or '').splitlines()[2]}")
