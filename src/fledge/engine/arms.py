"""What the controller chooses between: an arm for each round, and a kind for each request."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class Arm(NamedTuple):
    """What is drafted in a round, or verified: a chain of `depth` tokens, a tree of `depth` levels; 0: nothing."""

    depth: int
    is_tree: bool = False


PLAIN = Arm(0)


class RequestKind(StrEnum):
    """How a request's tokens are decided: how often its drafts stand and what its rounds cost depend on it."""

    GREEDY = "greedy"
    SAMPLED = "sampled"  # drafts are the drafter's best: a seed gives the same text with and without them
    SAMPLED_DRAFTS = "sampled drafts"  # they are drawn as well and accepted by rejection, which more of them survive

    @classmethod
    def of_round(cls, kinds: Collection["RequestKind"]) -> "RequestKind":
        """The kind of a round of these: its costliest one's."""
        return next((kind for kind in (cls.SAMPLED_DRAFTS, cls.SAMPLED) if kind in kinds), cls.GREEDY)


Acceptance = Mapping[
    RequestKind, Sequence[float]
]  # by depth: of the drafts before which all stand, the share that does
