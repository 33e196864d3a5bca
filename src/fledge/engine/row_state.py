"""What the device knows of the running requests. A round reads and writes it without the host in between.

Each running request has a row. The last row belongs to nobody: rounds are padded with it, and what they compute for
it goes to block 0 of the caches, which belongs to nobody either.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fledge.decoding.sampling import SamplingRows
from fledge.engine.request import Request


class RowState:
    """One row for each running request, `padding_row` for none. Host writes are queued on the device's stream."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_blocks: int,
        max_depth: int,
        device: torch.device,
        tree_nodes: int = 0,
        draft_probs_vocab: int = 0,
    ) -> None:
        """`tree_nodes` makes room for draft trees, `draft_probs_vocab` for the distributions of sampled drafts."""
        rows = max_requests + 1
        self.padding_row = max_requests
        self.device = device

        def column(dtype: torch.dtype, *more: int) -> Tensor:
            return torch.zeros(rows, *more, dtype=dtype, device=device)

        self.last_token = column(torch.int64)  # chosen, but not yet seen by the target
        self.length = column(torch.int64)  # tokens the target has seen: the position of last_token
        self.drafts = column(torch.int64, max_depth)
        self.draft_count = column(torch.int64)  # how many of `drafts` are there
        self.draft_until = column(torch.int64)  # no drafts for positions from here on; 0: no speculation at all
        self.draft_limit = column(torch.int64)  # no more drafts than this in a round
        self.tree_tokens = column(torch.int64, tree_nodes)
        self.tree_parents = torch.full_like(self.tree_tokens, -1)
        self.tree_depths = torch.ones_like(self.tree_tokens)
        self.draft_probs = column(torch.float32, max_depth, draft_probs_vocab)
        self.block_tables = column(torch.int32, max_blocks)
        self.temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.is_greedy = torch.ones(rows, dtype=torch.bool, device=device)
        self.top_k = column(torch.int64)
        self.top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self.min_p = column(torch.float32)
        self.seed = column(torch.int64)

    def begin(self, rows: Sequence[int], requests: Sequence[Request], vocab_size: int) -> None:
        """Set up `rows` for requests whose prompts are about to be read."""
        params = [request.params for request in requests]
        index, draft_until, draft_limit, seed, is_greedy, top_k = self.tensor(
            [
                rows,
                [request.draft_until for request in requests],
                [request.draft_limit for request in requests],
                [request.seed for request in requests],
                [p.is_greedy for p in params],
                [min(p.top_k, vocab_size) for p in params],
            ]
        )
        temperature, top_p, min_p = self.tensor(
            [
                [1.0 if p.is_greedy else p.temperature for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
            ],
            torch.float64,
        )
        self.draft_until[index] = draft_until
        self.draft_limit[index] = draft_limit
        self.draft_count[index] = 0
        self.seed[index] = seed
        self.is_greedy[index] = is_greedy != 0
        self.temperature[index] = temperature.float()
        self.top_k[index] = top_k
        self.top_p[index] = top_p
        self.min_p[index] = min_p.float()

    def place_blocks(self, placements: Sequence[tuple[int, int, int]]) -> None:
        """Write (row, index in its table, block) for each new block of any request."""
        if placements:
            rows, indices, blocks = self.tensor(list(zip(*placements, strict=True)))
            self.block_tables[rows, indices] = blocks.to(torch.int32)

    def reset_padding(self) -> None:
        """The padding row must not wander off, or its positions would leave its block table."""
        self.length[self.padding_row].zero_()
        self.last_token[self.padding_row].zero_()

    def tensor(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return host values on the device, without waiting for it."""
        host = torch.tensor(values, dtype=dtype)
        if self.device.type == "cuda":
            return host.pin_memory().to(self.device, non_blocking=True)
        return host

    def sampling_rows(self, rows: Tensor, *, filtered: bool, vocab_size: int) -> SamplingRows:
        """Return the settings of `rows` [n] for `decoding.sampling`. Penalties and biases are not kept here."""
        off = torch.zeros_like(self.temperature[rows])
        return SamplingRows(
            temperature=self.temperature[rows],
            is_greedy=self.is_greedy[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            repetition_penalty=off + 1,
            presence_penalty=off,
            frequency_penalty=off,
            seed=self.seed[rows],
            logit_bias=None,
            all_greedy=False,
            any_greedy=True,
            any_penalty=False,
            any_min_p=filtered,
            any_top_p=filtered,
            max_top_k=vocab_size if filtered else 0,
        )
