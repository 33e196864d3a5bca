"""Blocks of the paged KV caches: allocation, prefix caching, eviction (LRU).

Bookkeeping on the host; the tensors are in `layers/paged_cache.py`. Target and drafter have separate caches with common
block numbers: slot i of a request's block table holds the target's and the drafter's row for position i.

A full block with final contents gets a key (a hash chained over all blocks before it) and can be reused by later
requests. The drafter's row at position i depends on token i + 1 too, so a block's key also covers the first token
*after* it: a hit never returns a drafter row computed for another continuation. (Without that, an engine must recompute
the end of every hit, or loses acceptance.)
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class BlockTable:
    """The blocks of one sequence, in order, and the keys of its full blocks. Changed by `BlockManager` only."""

    salt: bytes = b""  # blocks are shared only between sequences with the same salt
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)


class BlockManager:
    """Allocates blocks of `block_size` slots. Block 0 is never allocated: padding rows write there.

    A block is *free* (in no sequence, without a key), *cached* (in no sequence, with a key) or *used* (in one or more
    sequences). If there are no free blocks, the least recently used cached one is evicted.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        assert num_blocks >= 2, "one block for padding and one for use"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.asked_tokens = 0  # looked up by `match`
        self.hit_tokens = 0  # found by it
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def capacity(self) -> int:
        """Blocks that can be allocated, used ones included."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.capacity - self.available

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, tokens: Sequence[int], salt: bytes = b"") -> BlockTable:
        """Return a table with the longest cached prefix of `tokens`; at least one token is left to compute."""
        table = BlockTable(salt=salt)
        self.asked_tokens += len(tokens)
        if self.prefix_caching:
            for index in range((len(tokens) - 1) // self.block_size):
                key = self._key(table, tokens, index)
                block = self._block_of.get(key)
                if block is None:
                    break
                if self._references[block] == 0:
                    self._cached.pop(block)
                self._references[block] += 1
                table.blocks.append(block)
                table.keys.append(key)
        self.hit_tokens += len(table.blocks) * self.block_size
        return table

    def has_room(self, table: BlockTable, tokens: int) -> bool:
        """Whether the table has blocks for `tokens` tokens."""
        return len(table.blocks) * self.block_size >= tokens

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Allocate blocks for `tokens` tokens; False, and no change, if there are not enough."""
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing > self.available:
            return False
        table.blocks.extend(self._allocate() for _ in range(missing))
        return True

    def commit(self, table: BlockTable, tokens: Sequence[int], settled: int) -> None:
        """Give keys to the full blocks of the first `settled` positions, whose target and drafter rows are final.

        Of two equal blocks the first keeps the key.
        """
        if not self.prefix_caching:
            return
        full = min(settled, len(tokens) - 1) // self.block_size
        for index in range(len(table.keys), full):
            key = self._key(table, tokens, index)
            table.keys.append(key)
            if key not in self._block_of:
                self._block_of[key] = table.blocks[index]
                self._key_of[table.blocks[index]] = key

    def release(self, table: BlockTable) -> None:
        """Release the table's blocks and empty it. The last blocks of a sequence will be evicted first."""
        for block in reversed(table.blocks):
            assert self._references[block] > 0, f"block {block} is released more often than allocated"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)
        table.blocks.clear()
        table.keys.clear()

    def forget(self, table: BlockTable) -> list[int]:
        """Drop the keys of the table's blocks: their contents are wrong. Return the blocks no other table has."""
        for block in table.blocks:
            if block in self._key_of:
                del self._block_of[self._key_of.pop(block)]
        return [block for block in table.blocks if self._references[block] == 1]

    def reset_prefix_cache(self, tables: Iterable[BlockTable]) -> None:
        """Drop all keys: the drafter's rows are invalid. The blocks of `tables`, which are in use, can be committed
        again.
        """
        self._key_of.clear()
        self._block_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        for table in tables:
            table.keys.clear()

    def check_integrity(self, tables: Iterable[BlockTable] = ()) -> None:
        """Assert that every block is in exactly one state, and that reference counts match `tables`."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table.blocks:
                expected[block] += 1
        assert expected == self._references, "references do not match the block tables"
        idle = [*self._free, *self._cached]
        assert len(set(idle)) == len(idle), "a block is idle twice"
        assert all(self._references[block] == 0 for block in idle), "an idle block is referenced"
        assert sum(1 for count in self._references if count > 0) + len(idle) == self.capacity, "a block is lost"
        assert {key: block for block, key in self._key_of.items()} == self._block_of, "keys and blocks disagree"
        assert not set(self._free) & set(self._key_of), "a free block has a key"

    def _key(self, table: BlockTable, tokens: Sequence[int], index: int) -> bytes:
        """Return the key of block `index`: a hash of the previous block's key, its tokens and the token after them.

        Cryptographic, because a collision of two prefixes would expose another user's cache.
        """
        start = index * self.block_size
        parent = table.keys[index - 1] if index else table.salt
        covered = array("q", tokens[start : start + self.block_size + 1])
        return hashlib.blake2b(parent + covered.tobytes(), digest_size=16).digest()

    def _allocate(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._references[block] = 1
        return block
