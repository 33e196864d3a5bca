"""Prompts in one pass with rounds wherever that is possible, whether it pays or not: for tests of the engine."""

from collections import Counter

from fledge.engine.arms import Arm
from fledge.engine.engine import LLMEngine
from fledge.engine.mixing import MixedProgram, Mixing


class AnyMixing(Mixing):
    """Takes every step with prompts that can be one pass, with at most `bound` tokens of them; None: any number."""

    bound: int | None
    steps: Counter[bool]  # by whether they were one pass

    def along(self, batch: int, arm: Arm) -> tuple[Arm, int] | None:
        return None if self.bound is None else (arm, self.bound)

    def takes(self, program: MixedProgram, than: float = 0.0) -> bool:
        fits = self._graphs is None or self.padded(program) is not None
        self.steps[fits] += 1
        return fits


def mix(engine: LLMEngine, bound: int | None = None) -> AnyMixing:
    """Let an engine read prompts along with rounds; return what decides it."""
    mixing = engine.runner.mixing = AnyMixing(engine.runner.state, engine.runner.graphs)
    mixing.bound, mixing.steps = bound, Counter()
    return mixing
