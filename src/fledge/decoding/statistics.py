"""The definition of acceptance length that training, eval, drift, server metrics and bench use.

A round is one verification of at least one draft. With the accepted drafts of all rounds summed,

    acceptance length = 1 + accepted / rounds

the mean number of tokens emitted per round. A tree round counts as the tree's depth drafted and the path's depth
accepted, so trees and chains are comparable. Steps without drafts are not rounds, as in vLLM: they say nothing about
the drafter.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

HOPELESS_ROUNDS, HOPELESS_RATE = 30, 0.05  # at least so many rounds, with a lower acceptance of the first draft
COPIED_NGRAM = 8
LOOPING = 0.2  # fraction of repeated tokens above which only figures without repetition should be compared
COPYING = 0.2  # fraction of tokens copied from prompts above which figures measure copying too


def repeated_tokens(tokens: Sequence[Hashable], n: int = COPIED_NGRAM) -> list[bool]:
    """Return a mask of the answer's tokens that lie in an n-gram which occurred in it before, overlaps included.

    Loops are easy to draft, so acceptance inside repetition says little about a drafter.
    """
    found, seen = [False] * len(tokens), set[tuple[Hashable, ...]]()
    for end in range(n, len(tokens) + 1):
        ngram = tuple(tokens[end - n : end])
        if ngram in seen:
            found[end - n : end] = [True] * n
        seen.add(ngram)
    return found


def copied_tokens(prompt: Sequence[Hashable], answer: Sequence[Hashable], n: int = COPIED_NGRAM) -> list[bool]:
    """Return a mask of the answer's tokens that lie in an n-gram of the answer which also starts in the prompt.

    Copied text can be drafted by lookup. The n-gram must lie entirely in the answer, so template tokens between prompt
    and answer make no copy; its earlier occurrence may extend beyond the end of the prompt.
    """
    ngrams = {tuple(answer[start : start + n]) for start in range(len(answer) - n + 1)}
    text, ends = [*prompt, *answer[: n - 1]], {(ngram[0], ngram[-1]) for ngram in ngrams}
    # Compare first and last token before building an n-gram: few positions of a long prompt match both.
    places = (place for place, pair in enumerate(zip(text, text[n - 1 :], strict=False)) if pair in ends)
    copied = {ngram for place in places if (ngram := tuple(text[place : place + n])) in ngrams}
    found = [False] * len(answer)
    for start in range(len(answer) - n + 1 if copied else 0):
        if tuple(answer[start : start + n]) in copied:
            found[start : start + n] = [True] * n
    return found


@dataclass(kw_only=True)
class AcceptanceStatistics:
    """Counts of rounds by drafted and accepted tokens. `add` and `count` change it in place.

    All figures are derived from these counts, so they are consistent. `acceptance_length` is None before the first
    round: 1.0 would mean that no draft was ever accepted.
    """

    tally: Counter[tuple[int, int]] = field(default_factory=Counter)  # (drafted, accepted) -> rounds

    def add(self, *, drafted: int, accepted: int, rounds: int = 1) -> None:
        """Count `rounds` rounds with `drafted` drafts (for trees: depth), `accepted` of them accepted."""
        assert 0 <= accepted <= drafted, f"{accepted} of {drafted} drafts cannot have been accepted"
        if drafted > 0 and rounds > 0:
            self.tally[drafted, accepted] += rounds

    def count(self, rounds: Iterable[tuple[int, int]]) -> None:
        """Count one round for each (drafted, accepted). Those without drafts are ignored."""
        self.tally.update(key for key in rounds if key[0] > 0)

    @classmethod
    def merge(cls, parts: Iterable["AcceptanceStatistics"]) -> "AcceptanceStatistics":
        """Return the sum of several statistics: every round has the same weight."""
        pooled = cls()
        for part in parts:
            pooled.tally.update(part.tally)
        return pooled

    def since(self, before: "AcceptanceStatistics") -> "AcceptanceStatistics":
        """Return what was added after `before`, an earlier copy of these statistics."""
        return AcceptanceStatistics(tally=self.tally - before.tally)

    @property
    def rounds(self) -> int:
        return self.tally.total()

    @property
    def depth(self) -> int:
        """The largest number of drafts in a round."""
        return max((drafted for drafted, _ in self.tally), default=0)

    @property
    def drafted_by_depth(self) -> tuple[int, ...]:
        """Rounds that had a draft at each depth; entry 0 is the first draft."""
        return self._by_depth(lambda drafted, _, depth: drafted > depth)

    @property
    def accepted_by_depth(self) -> tuple[int, ...]:
        """Rounds in which the draft at each depth was accepted."""
        return self._by_depth(lambda _, accepted, depth: accepted > depth)

    @property
    def reached_by_depth(self) -> tuple[int, ...]:
        """Rounds that had a draft at each depth, with all drafts before it accepted."""
        return self._by_depth(lambda drafted, accepted, depth: drafted > depth and accepted >= depth)

    def _by_depth(self, counts: Callable[[int, int, int], bool]) -> tuple[int, ...]:
        """Number of rounds at each depth for which `counts(drafted, accepted, depth)` holds."""
        tally = self.tally.items()
        return tuple(sum(rounds for key, rounds in tally if counts(*key, depth)) for depth in range(self.depth))

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per round, the target's own token included; None before the first round."""
        return 1.0 + sum(self.accepted_by_depth) / self.rounds if self.rounds else None

    @property
    def rate_by_depth(self) -> tuple[float, ...]:
        """Fraction of the rounds with a draft at each depth in which it was accepted (vLLM's per-position rate)."""
        return tuple(a / d for a, d in zip(self.accepted_by_depth, self.drafted_by_depth, strict=True))

    @property
    def conditional_rate_by_depth(self) -> tuple[float | None, ...]:
        """The same among rounds in which all earlier drafts were accepted; None at depths that no round reached."""
        return tuple(a / r if r else None for a, r in zip(self.accepted_by_depth, self.reached_by_depth, strict=True))

    @property
    def is_hopeless(self) -> bool:
        """Whether hardly any first draft was accepted: a drafter that fits the target does better on any text."""
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
    """Which tokens of an answer are repeated or copied, to select rounds that start on neither.

    A round is (start, drafted, accepted); `start` is its first position, prompt included.
    """

    prompt_tokens: int
    repeated: Sequence[bool]
    copied: Sequence[bool]  # not exclusive: a token may be both

    @classmethod
    def of(cls, prompt: Sequence[Hashable], answer: Sequence[Hashable]) -> "Overlap":
        return cls(len(prompt), repeated_tokens(answer), copied_tokens(prompt, answer))

    def fresh(self, rounds: Iterable[tuple[int, int, int]]) -> AcceptanceStatistics:
        """Statistics of the rounds that do not start on a repeated token."""
        return self._outside(rounds, self.repeated)

    def novel(self, rounds: Iterable[tuple[int, int, int]]) -> AcceptanceStatistics:
        """Statistics of the rounds that start on neither a repeated nor a copied token."""
        return self._outside(rounds, [any(pair) for pair in zip(self.repeated, self.copied, strict=True)])

    def _outside(self, rounds: Iterable[tuple[int, int, int]], excluded: Sequence[bool]) -> AcceptanceStatistics:
        found = AcceptanceStatistics()
        in_answer = ((start - self.prompt_tokens, drafted, accepted) for start, drafted, accepted in rounds)
        # A round may start behind the last token of an answer that was trimmed.
        kept = ((drafted, accepted) for start, drafted, accepted in in_answer if not any(excluded[start : start + 1]))
        found.count(kept)
        return found
