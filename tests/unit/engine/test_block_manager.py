"""The pool against a model that remembers, for each block, the very text it was computed for."""

from collections import OrderedDict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from fledge.engine.block_manager import BlockManager, BlockTable

Text = tuple[int, ...]


class Sequence:
    """A text, its table, and how many of its positions are settled."""

    def __init__(self, tokens: list[int], table: BlockTable) -> None:
        self.tokens = tokens
        self.table = table
        self.settled = len(table.blocks)


class PoolMachine(RuleBasedStateMachine):
    """Two tokens and short blocks, so that texts share prefixes all the time, and part in all places."""

    @initialize(
        num_blocks=st.integers(2, 12), block_size=st.integers(1, 3), caching=st.sampled_from([True, True, False])
    )
    def start(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.pool = BlockManager(num_blocks, block_size, prefix_caching=caching)
        self.size, self.caching = block_size, caching
        self.sequences: list[Sequence] = []
        self.findable: dict[Text, int] = {}  # the text up to and with the token after a block -> the block
        self.idle: OrderedDict[int, Text] = OrderedDict()  # findable blocks in no sequence, oldest first

    def _covered(self, tokens: list[int], index: int) -> Text:
        return tuple(tokens[: (index + 1) * self.size + 1])

    def _check(self) -> None:
        self.pool.check_integrity(sequence.table for sequence in self.sequences)
        assert all(0 not in sequence.table.blocks for sequence in self.sequences), "block 0 is for padding"
        used = {block for sequence in self.sequences for block in sequence.table.blocks}
        assert self.pool.used == len(used)
        assert list(self.pool._cached) == list(self.idle), "evicted in another order than that of last use"

    def _take(self, table: BlockTable, tokens: int) -> bool:
        before, available = list(table.blocks), self.pool.available
        free = available - len(self.idle)
        wanted = self.pool.blocks_for(tokens) - len(before)
        grown = self.pool.grow(table, tokens)
        assert grown == (wanted <= available)
        if not grown:
            assert table.blocks == before
            return False
        assert table.blocks[: len(before)] == before
        fresh = table.blocks[len(before) :]
        assert len(fresh) == max(wanted, 0)
        for number, block in enumerate(fresh):
            if number < free:
                assert block not in self.idle, "a cached block is given up although there are free ones"
            else:
                oldest, text = self.idle.popitem(last=False)
                assert block == oldest
                del self.findable[text]
        return True

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def begin(self, tokens: list[int]) -> None:
        expected: list[int] = []
        if self.caching:
            for index in range((len(tokens) - 1) // self.size):
                block = self.findable.get(self._covered(tokens, index))
                if block is None:
                    break
                expected.append(block)
        hits = self.pool.hit_tokens
        table = self.pool.match(tokens)
        assert table.blocks == expected
        assert self.pool.hit_tokens - hits == len(expected) * self.size < max(len(tokens), 1)
        for block in expected:
            self.idle.pop(block, None)
        sequence = Sequence(tokens, table)
        sequence.settled = len(expected) * self.size
        self.sequences.append(sequence)
        if not self._take(table, len(tokens)):
            self._release(len(self.sequences) - 1)
        self._check()

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def write_on(self, which: int, tokens: list[int]) -> None:
        sequence = self.sequences[which % len(self.sequences)]
        if self._take(sequence.table, len(sequence.tokens) + len(tokens)):
            sequence.tokens = sequence.tokens + tokens
        self._check()

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), share=st.floats(0, 1))
    def commit(self, which: int, share: float) -> None:
        sequence = self.sequences[which % len(self.sequences)]
        sequence.settled = max(sequence.settled, round(share * len(sequence.tokens)))
        self.pool.commit(sequence.table, sequence.tokens, sequence.settled)
        if self.caching:
            # A block whose next token is not known has no key yet.
            for index in range(min(sequence.settled, len(sequence.tokens) - 1) // self.size):
                block = sequence.table.blocks[index]
                if block not in self.findable.values():
                    self.findable.setdefault(self._covered(sequence.tokens, index), block)
        self._check()

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        self._release(which % len(self.sequences))
        self._check()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.pool.reset_prefix_cache(sequence.table for sequence in self.sequences)
        self.findable.clear()
        self.idle.clear()
        for sequence in self.sequences:
            sequence.settled = 0
        self._check()

    def _release(self, which: int) -> None:
        sequence = self.sequences.pop(which)
        held = {block for other in self.sequences for block in other.table.blocks}
        texts = {block: text for text, block in self.findable.items()}
        for block in reversed(sequence.table.blocks):
            if block not in held and block in texts:
                self.idle[block] = texts[block]
        self.pool.release(sequence.table)
        assert sequence.table == BlockTable()

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            while self.sequences:
                self.end(0)
            assert self.pool.used == 0


def test_the_pool_behaves_as_its_model() -> None:
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=80,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def committed(pool: BlockManager, tokens: list[int]) -> None:
    """Put a text into the cache, as a finished request leaves it."""
    table = pool.match(tokens)
    assert pool.grow(table, len(tokens))
    pool.commit(table, tokens, len(tokens) - 1)
    pool.release(table)


def hit(pool: BlockManager, tokens: list[int]) -> int:
    table = pool.match(tokens)
    found = len(table.blocks)
    pool.release(table)
    return found


def test_a_hit_needs_the_token_after_the_block_to_be_the_same() -> None:
    """The drafter's last row in a block is made from the token after it."""
    pool = BlockManager(10, 4)
    committed(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert hit(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]) == 2
    assert hit(pool, [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]) == 1
    assert hit(pool, [1, 2, 3, 4, 0, 0]) == 0
    assert hit(pool, [1, 2, 3, 4, 5]) == 1
    assert hit(pool, [1, 2, 3, 4]) == 0  # something must be left to compute, and token 4 is not there to compare


def test_a_block_is_found_only_behind_the_same_blocks() -> None:
    pool = BlockManager(10, 2)
    committed(pool, [1, 2, 3, 4, 5])
    assert hit(pool, [3, 4, 5]) == 0
    assert hit(pool, [9, 2, 3, 4, 5]) == 0


def test_the_end_of_a_text_is_given_up_before_its_beginning() -> None:
    pool, text, other = BlockManager(6, 2), [1, 2, 3, 4, 5, 6, 7], BlockTable()
    committed(pool, text)  # three blocks with keys; two are free
    assert pool.grow(other, 4)
    for left in (2, 1, 0):
        assert hit(pool, text) == left + 1
        assert pool.grow(other, 2 * len(other.blocks) + 2)
        assert hit(pool, text) == left
    assert not pool.grow(other, 2 * len(other.blocks) + 1)


def test_keys_tell_large_token_ids_apart() -> None:
    pool = BlockManager(10, 1)
    committed(pool, [2**17, 5])
    assert hit(pool, [2**17 + 2**32, 5]) == 0
    assert hit(pool, [2**17, 5]) == 1


def test_check_integrity_notices_what_is_wrong() -> None:
    def broken(spoil: str) -> BlockManager:
        pool = BlockManager(6, 2)
        committed(pool, [1, 2, 3, 4, 5])
        match spoil:
            case "lost":
                pool._free.pop()
            case "twice":
                pool._free.append(pool._free[0])
            case "references":
                pool._references[1] += 1
            case "keys":
                pool._block_of.popitem()
        return pool

    for spoil in ("lost", "twice", "references", "keys"):
        with pytest.raises(AssertionError):
            broken(spoil).check_integrity()
    table = BlockManager(3, 2).match([1])
    table.blocks.append(2)
    with pytest.raises(AssertionError, match="references"):
        BlockManager(3, 2).check_integrity([table])


def test_releasing_twice_is_noticed() -> None:
    pool = BlockManager(4, 2)
    table = pool.match([1, 2])
    pool.grow(table, 2)
    copy = BlockTable(blocks=list(table.blocks))
    pool.release(table)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(copy)
