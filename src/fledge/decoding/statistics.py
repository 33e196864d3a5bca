"""The one definition of acceptance length. Trainer, eval, drift, server metrics and bench all use this one.

A round is one verification of at least one draft. With `accepted` drafts of all rounds pooled,

    acceptance length = 1 + accepted / rounds

the mean number of tokens a round emits. A tree round counts as its tree's depth drafted and its path's depth
accepted, so trees and chains compare. Steps that drafted nothing are not rounds (vLLM counts in the same way):
they say nothing about the drafter.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

HOPELESS_ROUNDS, HOPELESS_RATE = 30, 0.05
COPIED_NGRAM = 8
LOOPING = 0.2  # of a target's tokens: where more are repeated, its figures without repetition are the ones to compare
COPYING = 0.2  # of a target's tokens: where more are copied from prompts, figures measure copying too


def repeated_tokens(tokens: Sequence[Hashable], n: int = COPIED_NGRAM) -> list[bool]:
    """Which tokens of an answer are inside an n-gram that was in it before; overlapping itself counts.

    A target that loops is easy to draft for, so acceptance inside repetition says little about a drafter.
    """
    found, seen = [False] * len(tokens), set[tuple[Hashable, ...]]()
    for end in range(n, len(tokens) + 1):
        ngram = tuple(tokens[end - n : end])
        if ngram in seen:
            found[end - n : end] = [True] * n
        seen.add(ngram)
    return found


def copied_tokens(prompt: Sequence[Hashable], answer: Sequence[Hashable], n: int = COPIED_NGRAM) -> list[bool]:
    """Which tokens of an answer are inside an n-gram of it that began in the prompt before.

    What copies can be drafted by looking it up. The n-gram lies in the answer as a whole, so the tokens of a template
    between the two make no copy; where it was before it may reach over the prompt's end.
    """
    ngrams = {tuple(answer[start : start + n]) for start in range(len(answer) - n + 1)}
    text, ends = [*prompt, *answer[: n - 1]], {(ngram[0], ngram[-1]) for ngram in ngrams}
    # Few places of a long prompt agree in the first and the last token: the others need no n-gram made.
    places = (place for place, pair in enumerate(zip(text, text[n - 1 :], strict=False)) if pair in ends)
    copied = {ngram for place in places if (ngram := tuple(text[place : place + n])) in ngrams}
    found = [False] * len(answer)
    for start in range(len(answer) - n + 1 if copied else 0):
        if tuple(answer[start : start + n]) in copied:
            found[start : start + n] = [True] * n
    return found


@dataclass(kw_only=True)
class AcceptanceStatistics:
    """A tally of rounds by how many drafts they had and how many of those stood. `add` changes it in place.

    Every figure is derived from the tally, so figures cannot disagree. Before the first round there is nothing
    to report and `acceptance_length` is None: 1.0 would say that a drafter was tried and never right.
    """

    tally: Counter[tuple[int, int]] = field(default_factory=Counter)  # (drafted, accepted) -> rounds

    def add(self, *, drafted: int, accepted: int, rounds: int = 1) -> None:
        """Count `rounds` rounds of `drafted` drafts (a tree's depth) of which the first `accepted` stood."""
        assert 0 <= accepted <= drafted, f"{accepted} of {drafted} drafts cannot have been accepted"
        if drafted > 0 and rounds > 0:
            self.tally[drafted, accepted] += rounds

    def count(self, rounds: Iterable[tuple[int, int]]) -> None:
        """Count rounds, of each how many drafts it had and how many of them stood; some may have had none."""
        self.tally.update(rounds)
        for none in [key for key in self.tally if key[0] == 0]:
            del self.tally[none]

    @classmethod
    def merge(cls, parts: Iterable["AcceptanceStatistics"]) -> "AcceptanceStatistics":
        """Pool several tallies into a new one: rounds weigh the same whichever part they come from."""
        pooled = cls()
        for part in parts:
            pooled.tally.update(part.tally)
        return pooled

    def since(self, before: "AcceptanceStatistics") -> "AcceptanceStatistics":
        """What was added after `before`, an earlier state of this tally."""
        return AcceptanceStatistics(tally=self.tally - before.tally)

    @property
    def rounds(self) -> int:
        return self.tally.total()

    @property
    def depth(self) -> int:
        """The deepest drafting of any round."""
        return max((drafted for drafted, _ in self.tally), default=0)

    @property
    def drafted_by_depth(self) -> tuple[int, ...]:
        """Rounds that drafted to each depth; entry 0 is the first draft."""
        return self._by_depth(lambda drafted, _, depth: drafted > depth)

    @property
    def accepted_by_depth(self) -> tuple[int, ...]:
        """Rounds in which the draft at each depth stood."""
        return self._by_depth(lambda _, accepted, depth: accepted > depth)

    @property
    def reached_by_depth(self) -> tuple[int, ...]:
        """Rounds in which the draft at each depth was up for acceptance: it exists, and all before it stood."""
        return self._by_depth(lambda drafted, accepted, depth: drafted > depth and accepted >= depth)

    def _by_depth(self, counts: Callable[[int, int, int], bool]) -> tuple[int, ...]:
        """Rounds that count at each depth, by what they drafted and accepted."""
        tally = self.tally.items()
        return tuple(sum(rounds for key, rounds in tally if counts(*key, depth)) for depth in range(self.depth))

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per round, the target's own one included; None before the first round."""
        return 1.0 + sum(self.accepted_by_depth) / self.rounds if self.rounds else None

    @property
    def rate_by_depth(self) -> tuple[float, ...]:
        """Share of the rounds drafted to each depth whose draft there stood (vLLM's per-position rate)."""
        return tuple(a / d for a, d in zip(self.accepted_by_depth, self.drafted_by_depth, strict=True))

    @property
    def conditional_rate_by_depth(self) -> tuple[float | None, ...]:
        """The same among rounds in which all earlier drafts stood; None at a depth that no round reached."""
        return tuple(a / r if r else None for a, r in zip(self.accepted_by_depth, self.reached_by_depth, strict=True))

    @property
    def is_hopeless(self) -> bool:
        """Of many first drafts hardly one stood: a drafter of this target does better on any text."""
        return self.rounds >= HOPELESS_ROUNDS and self.accepted_by_depth[0] < HOPELESS_RATE * self.rounds

    def to_dict(self) -> dict[str, int | float | list[int] | list[float] | list[float | None] | None]:
        """Return the figures as JSON values."""
        return {
            "rounds": self.rounds,
            "acceptance_length": self.acceptance_length,
            "drafted_by_depth": list(self.drafted_by_depth),
            "accepted_by_depth": list(self.accepted_by_depth),
            "rate_by_depth": list(self.rate_by_depth),
            "conditional_rate_by_depth": list(self.conditional_rate_by_depth),
        }


@dataclass(frozen=True)
class Overlap:
    """Which tokens of an answer were there before, and so the rounds that start on none of them.

    A round is its first place in prompt and answer together, what it drafted and what of that stood.
    """

    prompt_tokens: int
    repeated: Sequence[bool]
    copied: Sequence[bool]  # some may be repeated too

    @classmethod
    def of(cls, prompt: Sequence[Hashable], answer: Sequence[Hashable]) -> "Overlap":
        return cls(len(prompt), repeated_tokens(answer), copied_tokens(prompt, answer))

    def fresh(self, rounds: Iterable[tuple[int, int, int]]) -> AcceptanceStatistics:
        """Those that start on no repeated token."""
        return self._outside(rounds, self.repeated)

    def novel(self, rounds: Iterable[tuple[int, int, int]]) -> AcceptanceStatistics:
        """Of the fresh ones, those that start on no copied token."""
        return self._outside(rounds, [any(pair) for pair in zip(self.repeated, self.copied, strict=True)])

    def _outside(self, rounds: Iterable[tuple[int, int, int]], tokens: Sequence[bool]) -> AcceptanceStatistics:
        found = AcceptanceStatistics()
        within = ((start - self.prompt_tokens, drafted, accepted) for start, drafted, accepted in rounds)
        found.count((drafted, accepted) for start, drafted, accepted in within if not any(tokens[start : start + 1]))
        return found
