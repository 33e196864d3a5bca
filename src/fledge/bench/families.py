"""Contenders that are one drafter at several depths: which they are, and which depth is the fastest where."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fledge.bench.best import is_slower
from fledge.bench.figures import Key, RatioRow, Row
from fledge.evaluation.results import Cell, Contender, Load
from fledge.report.intervals import Interval

MANY_DEPTHS = 3  # from here on, a line for each depth hides what the drafter does
_DEPTH = "num_speculative_tokens"
_NO_CHAIN = {"tree_width", "tree_budget", "num_speculative_tokens_per_batch_size"}  # a depth alone does not tell it


@dataclass(frozen=True)
class Family:
    """Chains of one drafter that differ in depth and nothing else, the shallowest first."""

    title: str
    chains: tuple[tuple[int, str], ...]  # depth, name of the contender

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.chains)

    @property
    def has_many_depths(self) -> bool:
        return len(self.chains) >= MANY_DEPTHS


@dataclass(frozen=True, kw_only=True)
class BestDepth:
    """The fastest chain of a family for each user, of those that were measured in full under one load."""

    depth: int
    name: str
    over_baseline: Interval | None
    alike: tuple[int, ...]  # other depths that are not beyond noise slower


Bests = Mapping[tuple[Family, str, Load], BestDepth]  # by family, workload and load


def group_by_drafter(contenders: Sequence[Contender]) -> list[Family]:
    """All contenders in order of appearance; one that shares its drafter with no other is a family of its own."""
    groups: dict[str, list[tuple[int, Contender]]] = {}
    for one in contenders:
        speculation = one.speculation or {}
        depth = speculation.get(_DEPTH)
        if one.drafter is None or not isinstance(depth, int) or _NO_CHAIN & speculation.keys():
            groups[f"alone: {one.name}"] = [(0, one)]
            continue
        way = sorted((key, repr(value)) for key, value in speculation.items() if key != _DEPTH)
        same = repr((drafter_of(one), one.temperature, way))
        if any(depth == other for other, _ in groups.get(same, ())):
            same = f"alone: {one.name}"  # the same thing twice: what tells them apart is not known here
        groups.setdefault(same, []).append((depth, one))
    return [_family(sorted(several, key=lambda pair: pair[0])) for several in groups.values()]


def drafter_of(one: Contender) -> tuple[str | None, ...]:
    """What has one colour in all pictures: a drafter on an engine, or a contender without one."""
    return (one.kind, one.target, one.drafter, one.inflated) if one.drafter is not None else (one.name,)


def _family(several: Sequence[tuple[int, Contender]]) -> Family:
    chains = tuple((depth, one.name) for depth, one in several)
    if len(chains) == 1:
        return Family(chains[0][1], chains)
    stems = {name.replace(f" K={depth}", "") for depth, name in chains}
    title = stems.pop() if len(stems) == 1 else f"{several[0][1].drafter} ({several[0][1].kind})"
    return Family(title, chains)


def best_depths(
    families: Sequence[Family],
    rows: Sequence[Row],
    ratios: Sequence[RatioRow],
    cells: Mapping[Key, Sequence[Cell]],
) -> Bests:
    """Where a load has ratios they decide, as they are what is shown; else speeds do."""
    found: dict[tuple[Family, str, Load], BestDepth] = {}
    over = {row.key: row.per_user for row in ratios}
    speeds = {row.key: row.figures.per_user_tokens_per_second for row in rows if not row.figures.partial}
    for workload, load in dict.fromkeys(row.key[1:] for row in rows):
        for family in families:
            keys = {depth: (name, workload, load) for depth, name in family.chains}
            known = [
                {depth: value.value for depth, key in keys.items() if (value := of.get(key)) is not None}
                for of in (over, speeds)
            ]
            values = known[0] or known[1]
            if not values:
                continue
            best = max(values, key=values.__getitem__)
            fast = cells[keys[best]]
            alike = tuple(depth for depth in values if depth != best and not is_slower(fast, cells[keys[depth]]))
            found[family, workload, load] = BestDepth(
                depth=best, name=keys[best][0], over_baseline=over.get(keys[best]), alike=alike
            )
    return found
