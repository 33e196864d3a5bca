"""Pictures of one drafter's attention, and what all pictures have in common."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fledge.drift.result import DriftResult
from fledge.drift.summary import PROMPT_SEGMENTS
from fledge.report.charts import INK, PAPER, SIZE, frame, new_figure, percentages, put_legend, unframed

# From the bottom up: what drafts gain and what the first token loses both have a straight edge to be read from.
STACKED = ("drafted", "output", "prompt", "user", "assistant", "tool", "system", "template", "sink")
SEGMENT_COLOURS = {
    "drafted": "#d1495b",
    "output": "#edae49",
    "prompt": "#5b9f6e",
    "user": "#3f8f6b",
    "assistant": "#8fc08a",
    "tool": "#b0a160",
    "system": "#5fb3b3",
    "template": "#9a8fc4",
    "sink": "#30638e",
}
SEGMENT_TITLES = {
    "drafted": "own drafts",
    "output": "verified output",
    "prompt": "prompt",
    "user": "user",
    "assistant": "earlier answers",
    "tool": "tool results",
    "system": "system prompt",
    "template": "template",
    "sink": "first token",
}
_MANY_HEADS = 24


def segments_of(result: DriftResult) -> list[str]:
    """The position classes that there was anything of, from the bottom of the stack up."""
    return [name for name in STACKED if any(one.uniform_mass[name] > 0 for one in result.by_depth)]


def draw_attention(result: DriftResult) -> Figure:
    figure, axes = new_figure()
    depths = [one.depth for one in result.by_depth]
    names = segments_of(result)
    shares = [[one.attention.mass[name] for one in result.by_depth] for name in names]
    # A stack of one depth has no width: it gets some.
    x, bands = (depths, shares) if len(depths) > 1 else ([0.6, 1.4], [[*share, *share] for share in shares])
    colours = [SEGMENT_COLOURS[name] for name in names]
    axes.stackplot(x, bands, labels=[SEGMENT_TITLES[n] for n in names], colors=colours, edgecolor=PAPER, linewidth=0.8)
    even = [one.uniform_mass["drafted"] for one in result.by_depth]
    axes.plot(depths, even, color=INK, linestyle=":", linewidth=1.6, label="own drafts if even")
    frame(axes, depths, percent=True)
    axes.set_ylim(0, 1)
    axes.set_xlim(x[0], x[-1])
    put_legend(figure, axes, columns=3)
    return figure


def draw_heat_map(result: DriftResult) -> Figure:
    names = segments_of(result)[::-1]
    depths = [one.depth for one in result.by_depth]
    figure, axes = new_figure((SIZE[0], 0.85 + 0.3 * len(names)))
    shares = np.array([[one.attention.mass[name] for one in result.by_depth] for name in names])
    axes.pcolormesh(shares, cmap="Blues", vmin=0, vmax=1, edgecolors=PAPER, linewidth=0.8)
    for (row, column), share in np.ndenumerate(shares):
        axes.text(
            column + 0.5,
            row + 0.5,
            f"{100 * share:.0f}",
            ha="center",
            va="center",
            fontsize=8 if len(depths) <= 14 else 6,
            color="#0b1a2e" if share < 0.6 else "#f7fbff",
        )
    axes.set_yticks(np.arange(len(names)) + 0.5, [SEGMENT_TITLES[name] for name in names])
    axes.set_xticks(np.arange(len(depths)) + 0.5, [str(depth) for depth in depths])
    axes.invert_yaxis()
    unframed(axes)
    axes.set_xlabel("draft depth (cells: % of attention)")
    return figure


def draw_heads(result: DriftResult) -> Figure:
    heads = result.by_depth[0].heads
    depths = [one.depth for one in result.by_depth]
    figure = Figure(figsize=(SIZE[0], min(7.5, 1.3 + 0.17 * len(heads))), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    kinds = {"own drafts": ("drafted",), "prompt": PROMPT_SEGMENTS, "first token": ("sink",)}
    for axes, (title, labels) in zip(panels, kinds.items(), strict=True):
        shares = [[sum(h.attention.mass[label] for label in labels) for h in one.heads] for one in result.by_depth]
        image = axes.imshow(
            np.array(shares).T,
            cmap="Blues",
            vmin=0,
            vmax=1,
            aspect="auto",
            interpolation="nearest",
            extent=(depths[0] - 0.5, depths[-1] + 0.5, len(heads) - 0.5, -0.5),
        )
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        unframed(axes)
    panels[1].set_xlabel("draft depth")
    step = 1 + (len(heads) - 1) // _MANY_HEADS
    panels[0].set_yticks(
        range(0, len(heads), step), [f"{h.layer}.{h.head}" for h in heads[::step]], fontsize=7 if step == 1 else 6
    )
    panels[0].set_ylabel("layer.head")
    bar = figure.colorbar(image, ax=panels, fraction=0.05, format=percentages())
    bar.outline.set_visible(False)
    return figure
