"""The experiment as its file says it: which drafters there are, what they are trained on, how they are probed.

OUT/answers/          the stages of `fledge train` that all drafters share: prepare, regenerate, vocab, capture
OUT/drafters/NAME/    a run of `fledge train` for each drafter; those stages are links
OUT/probes/answers/   the target's answers to the prompts of the probe, once for all drafters
OUT/probes/NAME/      what the probe leaves of each drafter; NAME.json is what the report reads of it
OUT/results.json, report.html, report.png
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fledge.drift.perturb import parse_perturbation
from fledge.errors import ConfigError, nearest_name_hint
from fledge.files import read_yaml
from fledge.records import decode
from fledge.training.recipe import Recipe


class Arm(NamedTuple):
    """A way to train: drafters that differ in their seed alone."""

    variant: str
    depth: int  # of the training-time test

    @property
    def title(self) -> str:
        return f"{self.variant}, TTT {self.depth}"


class Fit(NamedTuple):
    """One drafter."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        words = f"{self.arm.variant} ttt{self.arm.depth} seed{self.seed}"
        return re.sub(r"[^A-Za-z0-9._]+", "-", words)


@dataclass(frozen=True, kw_only=True)
class Variant:
    depths: tuple[int, ...]
    drafter: dict[str, Any] = field(default_factory=dict)  # keys of the recipe's section
    against: str | None = None  # the variant it is compared with; None: the first


@dataclass(frozen=True, kw_only=True)
class ProbeSection:
    conditions: tuple[str, ...] = ()  # perturbations, besides the workload as it is
    depth: int = 16
    prompts: int = 96
    workload: str | None = None  # None: the prompts held out of training
    max_tokens: int = 128
    dtype: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All that the file says, and `overrides` of its recipe: `section.key=value`, for all drafters alike."""

    seeds: tuple[int, ...]
    variants: dict[str, Variant]
    train: dict[str, Any]  # sections of a recipe
    probe: ProbeSection = field(default_factory=ProbeSection)
    path: str = ""  # of the file
    overrides: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = (), variants: Sequence[str] = ()) -> "Experiment":
        """Read the file, some of its `variants` or all; refuse in one line what cannot be meant."""
        experiment = replace(decode(cls, read_yaml(path), str(path)), path=str(path), overrides=tuple(overrides))
        first = next(iter(experiment.variants), "")
        named = [one.against or first for one in experiment.variants.values()]
        for name in (*named, *variants):
            if name not in experiment.variants:
                raise ConfigError(
                    f"{path}: no variant is called '{name}'.{nearest_name_hint(name, experiment.variants)}"
                )
        if variants:
            chosen = {name: one for name, one in experiment.variants.items() if name in variants}
            chosen = {name: replace(one, against=one.against or first) for name, one in chosen.items()}
            experiment = replace(experiment, variants=chosen)
        names = [fit.name for fit in experiment.fits]
        for holds, what in (
            (names, "seeds, variants: expected at least one of each, and `depths` of every variant"),
            (len(set(names)) == len(names), "seeds, variants: expected different ones, in more than signs"),
            ("output" not in experiment.train, "train.output: that is --out"),
        ):
            if not holds:
                raise ConfigError(f"{path}: {what}")
        for name in experiment.probe.conditions:
            parse_perturbation(name)
        return experiment

    @property
    def arms(self) -> list[Arm]:
        return [Arm(name, depth) for name, variant in self.variants.items() for depth in variant.depths]

    @property
    def fits(self) -> list[Fit]:
        return [Fit(arm, seed) for arm in self.arms for seed in self.seeds]

    def base_of(self, arm: Arm) -> Arm | None:
        """What an arm is compared with, another variant at its depth; None: that is itself, or there is none."""
        base = Arm(self.variants[arm.variant].against or next(iter(self.variants)), arm.depth)
        return base if base != arm and base in self.arms else None

    def recipe(self, fit: Fit, output: Path) -> Recipe:
        """What `fledge train` runs for a drafter."""
        sections = {name: self.train.get(name) or {} for name in ("drafter", "fit")}
        drafter = sections["drafter"] | self.variants[fit.arm.variant].drafter
        own = {"drafter": drafter, "fit": sections["fit"] | {"depth": fit.arm.depth, "seed": fit.seed}}
        recipe = Recipe.of({**self.train, **own, "output": str(output.absolute())}, Path(self.path), self.overrides)
        if (recipe.fit.depth, recipe.fit.seed) != (fit.arm.depth, fit.seed):
            raise ConfigError(f"{self.path}: fit.depth and fit.seed are `depths` and `seeds` of the experiment")
        return recipe
