"""What a stage is: a function that fills one directory, and a key that says when its output can be used again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fledge.files import digest
from fledge.progress import Progress
from fledge.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What a stage gets. It may be started again after being killed at any moment, with its directory as it left it."""

    recipe: Recipe
    directory: Path  # its own; exists; holds whatever an interrupted earlier start wrote
    inputs: Mapping[str, Path] = field(default_factory=dict)  # directories of the stages it depends on, by name
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the pipeline."""

    name: str
    version: int  # raise it when the output for the same settings changes
    depends_on: tuple[str, ...]
    settings: Callable[[Recipe], dict[str, Any]]  # JSON values: all that the output depends on besides earlier stages
    run: Callable[[StageContext], dict[str, Any]]  # returns a summary for people, as JSON values
    collective: bool = False  # runs in every process of a torchrun; others run in the first one only

    def key(self, recipe: Recipe, input_keys: Mapping[str, str]) -> str:
        """Changes with anything that the output depends on."""
        parts = [self.name, self.version, self.settings(recipe), {name: input_keys[name] for name in self.depends_on}]
        return digest(parts)
