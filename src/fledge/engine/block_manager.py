"""Which block of the key/value caches belongs to whom: allocation, sharing of equal prefixes, eviction.

Pure bookkeeping on the host; the tensors are in `layers/paged_cache.py`. Target and drafter have caches of their own
but share the block numbers: slot i of a request's block table holds the target's and the drafter's row for position i.

A full block whose contents are final can be found again by later requests through its key, which chains the keys of
all blocks before it. The drafter's row at position i is computed from token i + 1 as well, so the key of a block also
covers the first token *after* it: a hit never hands out a drafter row made for another continuation. (An engine
that leaves this out must recompute the end of every hit, or loses acceptance.)
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class BlockTable:
    """The blocks of one sequence, in order, and the keys of those that are findable. Changed by `BlockManager` only."""

    salt: bytes = b""  # only sequences with the same share blocks
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)


class BlockManager:
    """Hands out blocks of `block_size` slots. Block 0 is never handed out: padding rows write there.

    A block is *free* (in no sequence and worth nothing), *cached* (in no sequence, but its key may be asked for) or
    *used* (in one or more sequences). Cached blocks are given up oldest first when there are no free ones.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        assert num_blocks >= 2, "one block for padding and one for use"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.asked_tokens = 0  # by `match`
        self.hit_tokens = 0
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out at all."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.capacity - self.available

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, tokens: Sequence[int], salt: bytes = b"") -> BlockTable:
        """Return a table with every cached block that begins `tokens`; at least one token is left to compute."""
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
        """Give the table room for `tokens` tokens; False, and nothing taken, when there are not enough blocks."""
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing > self.available:
            return False
        table.blocks.extend(self._fresh() for _ in range(missing))
        return True

    def commit(self, table: BlockTable, tokens: Sequence[int], settled: int) -> None:
        """Make the full blocks among the first `settled` positions of the sequence `tokens` findable.

        Settled means that target and drafter rows are final. Of two equal blocks the first to come keeps the key.
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
        """Give the table's blocks back and empty it. The end of a sequence is evicted before its beginning."""
        for block in reversed(table.blocks):
            assert self._references[block] > 0, f"block {block} is released more often than taken"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)
        table.blocks.clear()
        table.keys.clear()

    def forget(self, table: BlockTable) -> list[int]:
        """Let nobody find the table's blocks any more: what is in them is wrong. Return the blocks nobody else has."""
        for block in table.blocks:
            if block in self._key_of:
                del self._block_of[self._key_of.pop(block)]
        return [block for block in table.blocks if self._references[block] == 1]

    def forget_all(self, tables: Iterable[BlockTable]) -> None:
        """Let nobody find any block: the drafter's rows are void. Those of `tables` can be committed again."""
        self._key_of.clear()
        self._block_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        for table in tables:
            table.keys.clear()

    def check_integrity(self, tables: Iterable[BlockTable] = ()) -> None:
        """Assert that every block is in exactly one state, and referenced exactly as `tables` reference it."""
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
        """The key of block `index`: of its parent's key, its tokens, and the token after them.

        A cryptographic digest, because whoever can make two prefixes collide can read another user's cache.
        """
        start = index * self.block_size
        parent = table.keys[index - 1] if index else table.salt
        covered = array("q", tokens[start : start + self.block_size + 1])
        return hashlib.blake2b(parent + covered.tobytes(), digest_size=16).digest()

    def _fresh(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._references[block] = 1
        return block
