"""Grammars as finite automata over token ids, and what masked decoding answers under them: for tests of the engine."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.decoding.random import Stream, uniform
from fledge.decoding.sampling import SamplingRows, TokenHistory, distribution
from fledge.kernels.sample import choose
from tests.engine_cases import EOS, MAX_LENGTH, VOCAB, Ask, next_logits

Moves = dict[int, dict[int, int]]

# After each state, the tokens that may come and the states they lead to. A state without moves is complete.
PAIRS: Moves = {0: {2: 1, 3: 1, 4: 1}, 1: {5: 0, 0: 0, EOS: 2}, 2: {}}  # one of 2 3 4, then 5 or 0, ...
NARROW: Moves = {state: {(state * 2) % VOCAB: state + 1, (state + 3) % VOCAB: state + 1} for state in range(10)}
FORCED: Moves = {state: {token: state + 1} for state, token in enumerate((4, 4, 0, 2, 5, 3, 3, 3, 2, 0))}
LOOSE: Moves = {0: {token: 0 if token != 3 else 1 for token in range(VOCAB)}, 1: {0: 0, 4: 0, 5: 1}}
GRAMMARS = {"pairs": PAIRS, "narrow": NARROW, "forced": FORCED, "loose": LOOSE}


class Automaton:
    """The simplest honest constraint: a finite automaton over token ids."""

    def __init__(self, moves: Moves, vocab_size: int = VOCAB) -> None:
        self.moves, self.state, self._vocab_size = moves, 0, vocab_size
        self.refused_drafts = self.taken_drafts = 0

    def allowed(self) -> Tensor | None:
        return self._mask(self.state)

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        return len(self._states(tokens)) - 1

    def masks(self, tokens: Sequence[int]) -> list[Tensor | None]:
        states = self._states(tokens)
        self.taken_drafts += len(states) - 1
        self.refused_drafts += len(states) - 1 < len(tokens)
        return [self._mask(state) for state in states]

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.state = self.moves[self.state][token]

    @property
    def is_complete(self) -> bool:
        return not self.moves.get(self.state)

    def _states(self, tokens: Sequence[int]) -> list[int]:
        states = [self.state]
        for token in tokens:
            following = self.moves.get(states[-1], {}).get(token)
            if following is None:
                break
            states.append(following)
        return states

    def _mask(self, state: int) -> Tensor | None:
        after = self.moves.get(state, {})
        if len(after) == self._vocab_size:
            return None
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[list(after) or [EOS]] = True
        return mask


_logits = functools.cache(next_logits)  # many texts begin alike


def plain(ask: Ask, moves: Moves, max_length: int = MAX_LENGTH, kv_cache_dtype: str = "auto") -> tuple[list[int], str]:
    """Masked decoding, one token at a time, and nothing else."""
    constraint, tokens, params = Automaton(moves), list(ask.prompt), ask.params
    stops = set(params.stop_token_ids) | set(() if params.ignore_eos else ask.eos_ids)
    rows = SamplingRows.from_params([params], [ask.seed], vocab_size=VOCAB)
    while True:
        output = tokens[len(ask.prompt) :]
        mask = constraint.allowed()
        refused = torch.zeros(1, VOCAB, dtype=torch.bool) if mask is None else ~mask[None]
        held = torch.tensor([[len(output) < params.min_tokens and token in stops for token in range(VOCAB)]])
        forbidden = refused if (refused | held).all() else refused | held
        history = TokenHistory.from_tokens([ask.prompt], [output], vocab_size=VOCAB)
        probs = distribution(_logits(tuple(tokens), kv_cache_dtype), rows, history=history, forbidden=forbidden)
        tokens.append(int(choose(probs, uniform(rows.seed, torch.tensor([len(tokens)]), Stream.CHOICE))))
        constraint.accept(tokens[-1:])
        output = tokens[len(ask.prompt) :]
        if tokens[-1] in stops or constraint.is_complete:
            return output, "stop"
        if len(output) == params.max_tokens or len(tokens) == max_length:
            return output, "length"
