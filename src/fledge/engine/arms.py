"""Arms, between which the controller chooses for each round, and kinds of requests."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class Arm(NamedTuple):
    """What a round drafts or verifies: a chain of `depth` tokens, or a tree of `depth` levels; 0: no drafts."""

    depth: int
    is_tree: bool = False


PLAIN = Arm(0)


class RequestKind(StrEnum):
    """How a request's tokens and drafts are chosen. Acceptance rates and costs are known for each kind separately."""

    GREEDY = "greedy"
    SAMPLED = "sampled"  # argmax drafts: a seed gives the same text with and without speculation
    SAMPLED_DRAFTS = "sampled drafts"  # drafts are sampled too, and accepted by rejection sampling: more are accepted

    @classmethod
    def of_round(cls, kinds: Collection["RequestKind"]) -> "RequestKind":
        """Return the kind of a round: the most expensive one of its requests."""
        return next((kind for kind in (cls.SAMPLED_DRAFTS, cls.SAMPLED) if kind in kinds), cls.GREEDY)


# By depth: the acceptance rate of drafts whose predecessors were all accepted.
Acceptance = Mapping[RequestKind, Sequence[float]]
