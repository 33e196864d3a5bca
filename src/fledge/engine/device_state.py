"""State on the device: the models, their KV caches, and one row of tensors for each running request.

Rounds read and write it without the host. The last row is the padding row: batches are padded with it, and its keys and
values go to block 0 of the caches, which is never allocated.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.decoding.drafting import TreeShape
from fledge.decoding.params import SamplingParams
from fledge.decoding.sampling import SamplingRows
from fledge.decoding.tree import DraftTree, level_widths, tree_size
from fledge.devices import choose_dtype
from fledge.engine.adjustments import Adjustments
from fledge.engine.arms import Arm, RequestKind
from fledge.engine.config import FP8_CACHE_DTYPES, EngineConfig
from fledge.engine.invariance import set_batch_invariant
from fledge.engine.request import Request
from fledge.errors import ConfigError
from fledge.kernels.admit import AcceptanceCoefficients, AdmittedRound
from fledge.kernels.cache_codes import FP8
from fledge.kernels.filters import Filters, RowSettings
from fledge.kernels.round_ends import OpenedRound
from fledge.layers.block import attentions
from fledge.layers.linear import compute_weight
from fledge.layers.paged_cache import ChunkPass, PagedCache, RoundPass
from fledge.models.config import TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel
from fledge.progress import timed

_log = logging.getLogger("fledge.engine")

DEFAULT_CPU_CACHE_BYTES = 2 * 2**30
FP8_CAPABILITY = (8, 9)  # the first GPUs that convert E4M3
MAX_TREE_ROWS = 64  # of tree attention in one pass
DRAFT_PROBS_BYTES = 2**30  # limit for the distributions of sampled drafts, unless these are explicitly enabled


class DeviceState:
    """Models, caches, one row for each running request and `padding_row`, all on one device.

    Host writes are queued on the device's stream. `drafter` becomes None if it fails, and may be exchanged.
    """

    def __init__(self, config: EngineConfig, target: TargetModel, drafter: Drafter | None) -> None:
        """Allocate everything. `config.max_model_len` must be set."""
        assert config.max_model_len is not None
        check_runs_on(target.config, compute_weight(target).device)
        set_batch_invariant(target, config.batch_invariant, drafts_trees=config.drafts_trees)
        self.target, self.drafter = target, drafter
        self.device = compute_weight(target).device
        self.vocab_size = target.config.vocab_size
        self.verify_blocks = config.verify_blocks  # block verification of sampled drafts
        self.block_size = config.block_size or (64 if self.device.type == "cuda" else 16)
        self.tree: TreeShape | None = None  # None: chains only
        self.draft_vocab = self.vocab_size if drafter is None else drafter.config.draft_vocab_size
        nodes = scratch = 0
        levels: list[int] = []  # drafter rows at each level of a growing tree
        speculation, depth = config.speculative_config, config.max_depth
        if speculation is not None and speculation.tree_width is not None:
            self.tree = TreeShape(width=speculation.tree_width, budget=speculation.tree_budget)
            nodes = self.tree_nodes(depth)
            levels = level_widths(depth=depth, width=self.tree.width, vocab_size=self.draft_vocab)[1:]
            scratch = max(nodes + 1, self.tree.width * depth)  # slots beyond a sequence's end, for trees
        rows, self.padding_row = config.max_num_seqs + 1, config.max_num_seqs

        def column(dtype: torch.dtype, *more: int, fill: int = 0) -> Tensor:
            return torch.full((rows, *more), fill, dtype=dtype, device=self.device)

        # Before the caches, which take the rest of the memory.
        fits = 4 * rows * max(depth, 1) * self.vocab_size <= DRAFT_PROBS_BYTES
        self.can_sample_drafts = drafter is not None and (
            fits if config.sample_drafts is None else config.sample_drafts
        )
        self.draft_probs = column(torch.float32, max(depth, 1), self.vocab_size if self.can_sample_drafts else 0)
        # Slots a request needs beyond its known tokens: one unread round, one to run, its drafts, and room for trees.
        self.lookahead = 3 * (depth + 1) + scratch
        self.max_length = config.max_model_len + self.lookahead  # bound on any sequence
        # Per token; a drafter that replaces this one cannot have more.
        self.drafter_kv_bytes = 0 if drafter is None else _kv_bytes(config, drafter)
        self.num_blocks = config.num_blocks or self._count_blocks(config)
        with timed(_log, "caches made", self.num_blocks):
            self.target_cache = self._make_cache(config, target, batch_invariant=config.batch_invariant)
            self.drafter_cache = None if drafter is None else self._make_cache(config, drafter)

        self.last_token = column(torch.int64)  # the newest token, which the target has not processed yet
        self.length = column(torch.int64)  # tokens in the target's cache: the position of last_token
        self.drafts = column(torch.int64, max(depth, 1))
        self.confidence = column(torch.float32, max(depth, 1))  # the drafter's largest probability at each draft
        self.acceptance = torch.zeros(2, 1 + max(depth, 1), device=self.device)  # see `AcceptanceCoefficients`
        self.acceptance[:, 0] = 1.0
        self.draft_count = column(torch.int64)  # number of valid `drafts`
        self.draft_until = column(torch.int64)  # no drafts for positions from here on; 0: no speculation
        self.draft_limit = column(torch.int64)  # drafts per round
        self.tree_tokens = column(torch.int64, nodes)
        self.tree_parents = column(torch.int64, nodes, fill=-1)
        self.tree_depths = column(torch.int64, nodes, fill=1)
        self.tree_masks = column(torch.int64, nodes + 1, fill=1)
        read_depths = self.tensor([level for level, width in enumerate(levels) for _ in range(width)])
        self.read_depths = read_depths.expand(rows, -1)  # depths of a growing tree's drafter rows; constant
        self.sample_drafts = column(torch.bool)  # sample the drafts of chains, accept by rejection sampling
        self.block_tables = column(torch.int32, -(-self.max_length // self.block_size))
        # Without penalties and biases, which are in `adjustments`.
        self.sampling = SamplingRows.from_params(
            [SamplingParams(temperature=0.0)] * rows, [0] * rows, vocab_size=self.vocab_size, device=self.device
        )

        self.adjustments = Adjustments(self.vocab_size, depth, self.device)

    def begin(self, requests: Sequence[Request]) -> None:
        """Initialise the rows of requests before their prefill."""
        for request in requests:
            request.slot = None
            if request.adjusts and self.tree is None:  # with trees the host chooses their tokens
                self.adjustments.assign_slot(request)
        pairs = [(request, request.params) for request in requests]
        whole = [
            (
                *(r.running_row, r.draft_until, r.draft_limit, r.sample_drafts, r.seed, p.is_greedy),
                min(p.top_k, self.vocab_size),
            )
            for r, p in pairs
        ]
        real = [(1.0 if p.is_greedy else p.temperature, p.top_p, p.min_p) for _, p in pairs]
        index, *values = self.tensor(whole).unbind(1)
        values += self.tensor(real, torch.float64).unbind(1)
        own = self.sampling
        columns = (self.draft_until, self.draft_limit, self.sample_drafts, own.seed, own.is_greedy, own.top_k)
        for column, given in zip((*columns, own.temperature, own.top_p, own.min_p), values, strict=True):
            column[index] = given.to(column.dtype)
        self.draft_count[index] = 0

    def why_unfit(self, config: EngineConfig, drafter: Drafter) -> str | None:
        """Return why a drafter cannot replace the one that this state was allocated for; None if it can."""
        needed = _kv_bytes(config, drafter)
        if needed > self.drafter_kv_bytes:
            return f"its KV cache takes {needed} bytes a token, and there is room for {self.drafter_kv_bytes}"
        tree, vocabularies = self.tree, (self.draft_vocab, drafter.config.draft_vocab_size)
        if tree is not None and len({min(tree.width, size) for size in vocabularies}) > 1:
            return "draft trees have another shape with a vocabulary of its size"
        return None

    def cache_for(self, config: EngineConfig, drafter: Drafter) -> PagedCache:
        """Return the present drafter cache if it has the right shape for `drafter`; otherwise a new one."""
        cache, shape = self.drafter_cache, (drafter.config.num_layers, drafter.config.layer.kv_cache)
        if cache is not None and (cache.num_layers, cache.spec) == shape:
            return cache
        return self._make_cache(config, drafter)

    def set_drafter(self, drafter: Drafter, cache: PagedCache) -> None:
        """Use another drafter, which fits (`why_unfit`). The contents of `cache` are invalid."""
        self.drafter, self.drafter_cache, self.draft_vocab = drafter, cache, drafter.config.draft_vocab_size

    def reset_drafting(self, requests: Sequence[Request]) -> None:
        """Copy `draft_until` of the running requests; reset the acceptance coefficients."""
        self.acceptance.zero_()
        self.acceptance[:, 0].fill_(1.0)
        if requests:
            rows, until = self.tensor([[r.running_row for r in requests], [r.draft_until for r in requests]])
            self.draft_until[rows] = until

    def place_blocks(self, requests: Sequence[Request]) -> None:
        """Copy new blocks of the requests' tables to the device."""
        placements: list[tuple[int, int, int]] = []
        for request in requests:
            blocks = request.table.blocks
            if request.placed_blocks < len(blocks):
                placements += [(request.running_row, i, blocks[i]) for i in range(request.placed_blocks, len(blocks))]
                request.placed_blocks = len(blocks)
        if placements:
            rows, indices, numbers = self.tensor(list(zip(*placements, strict=True)))
            self.block_tables[rows, indices] = numbers.to(torch.int32)

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zero these blocks in both caches: what is not finite there would spread."""
        for cache in (self.target_cache, self.drafter_cache):
            if cache is not None:
                cache.clear(blocks)

    def reset_padding(self) -> None:
        """Reset the padding row: each round advances it, and its positions must stay within its block table."""
        self.length[self.padding_row].zero_()
        self.last_token[self.padding_row].zero_()

    def set_dummy_rows(self, count: int, kind: RequestKind, *, length: int, drafts: int) -> None:
        """Set the first `count` rows up as requests of this kind, length and number of drafts: to time rounds."""
        self.length[:count] = length
        self.draft_count[:count] = drafts
        self.sample_drafts[:count] = kind is RequestKind.SAMPLED_DRAFTS
        self.sampling.is_greedy[:count] = kind is RequestKind.GREEDY

    def tensor(self, values: Sequence[Any] | NDArray[np.int64], dtype: torch.dtype = torch.int64) -> Tensor:
        """Copy host values to the device, asynchronously."""
        host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def set_acceptance(self, coefficients: NDArray[np.float64]) -> None:
        """Replace the coefficients by which rounds, captured ones too, choose drafts to verify."""
        self.acceptance.copy_(self.tensor(coefficients.tolist(), torch.float32), non_blocking=True)

    @property
    def row_settings(self) -> RowSettings:
        """Sampling settings of all rows, for kernels."""
        own = self.sampling
        filters = Filters(top_k=own.top_k, top_p=own.top_p, min_p=own.min_p)
        return RowSettings(sampled=~own.is_greedy, temperature=own.temperature, filters=filters)

    def acceptance_of(self, rows: Tensor) -> AcceptanceCoefficients:
        return AcceptanceCoefficients(self.acceptance, self.sampling.is_greedy[rows])

    def drafted(self, rows: Tensor, arm: Arm) -> Tensor | DraftTree | None:
        """Return the drafts that a round of `rows` [batch] verifies: chains [batch, depth], or a batch of trees."""
        if not arm.is_tree:
            return self.drafts[rows, : arm.depth] if arm.depth else None
        nodes = self.tree_nodes(arm.depth)
        tokens = self.tree_tokens[rows, :nodes]
        return DraftTree(
            tokens=tokens,
            parents=self.tree_parents[rows, :nodes],
            depths=self.tree_depths[rows, :nodes],
            scores=tokens.float(),  # not used: the tree is already ranked
            max_depth=arm.depth,
        )

    def storage(
        self,
        cache: PagedCache,
        tables: Tensor,
        context: Tensor,
        slots: Tensor,
        *,
        tree_mask: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> RoundPass:
        """Return storage for the same number of new tokens in each sequence, at `slots`."""
        return RoundPass(
            cache=cache,
            block_tables=tables,
            context_lens=context,
            slots=slots,
            rows=len(slots) // len(context),
            max_context=self.max_length,
            tree_mask=tree_mask,
            depths=depths,
        )

    def ragged_storage(self, cache: PagedCache, opened: OpenedRound, admitted: AdmittedRound) -> ChunkPass:
        """Return storage for the admitted tokens of each sequence of a round."""
        return ChunkPass(
            cache=cache,
            block_tables=opened.tables,
            context_lens=opened.context,
            slots=admitted.slots,
            query_starts=admitted.starts,
            max_chunk=admitted.rows.shape[1],
            max_context=self.max_length,
            is_round=True,
        )

    def tree_nodes(self, depth: int) -> int:
        """Return the number of nodes to verify of a tree with `depth` levels."""
        tree = self.tree
        assert tree is not None
        nodes = tree_size(depth=depth, width=tree.width, budget=tree.budget, vocab_size=self.draft_vocab)
        if nodes + 1 > MAX_TREE_ROWS or tree.width * (depth - 1) > MAX_TREE_ROWS:
            raise ConfigError(
                f"a tree of width {tree.width}, depth {depth} and {nodes} nodes is too large: at most "
                f"{MAX_TREE_ROWS - 1} nodes, and width times (depth - 1) at most {MAX_TREE_ROWS}"
            )
        return nodes

    def _count_blocks(self, config: EngineConfig) -> int:
        """Return as many blocks as memory allows, but no more than all requests at full length could use."""
        per_block = self.block_size * (_kv_bytes(config, self.target) + self.drafter_kv_bytes)
        useful = config.max_num_seqs * -(-self.max_length // self.block_size) + 1
        budget = config.kv_cache_bytes or DEFAULT_CPU_CACHE_BYTES
        if config.kv_cache_bytes is None and self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            budget = int(free - total * (1 - config.gpu_memory_utilization))
        blocks = min(budget // per_block, useful)
        if blocks < 2:
            raise ConfigError(f"the KV cache has {budget} bytes, but a single block takes {per_block}")
        return blocks

    def _make_cache(
        self, config: EngineConfig, model: TargetModel | Drafter, *, batch_invariant: bool = False
    ) -> PagedCache:
        return PagedCache(
            model.config.layer.kv_cache,
            num_layers=model.config.num_layers,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=_kv_dtype(config, model),
            device=self.device,
            batch_invariant=batch_invariant,
        )


def check_runs_on(target: TargetConfig, device: torch.device) -> None:
    """Refuse, in one line, a target that has what the kernels for GPUs have not."""
    if device.type == "cuda" and any(target.layer_at(i).softcap is not None for i in range(target.num_layers)):
        raise ConfigError(
            f"device: {target.family} caps its attention scores (attn_logit_softcapping), and no kernel for GPUs here "
            "does; --device cpu runs it, --engine vllm serves it"
        )


def _kv_dtype(config: EngineConfig, model: TargetModel | Drafter) -> torch.dtype:
    """Return the dtype of a model's KV cache: the model's own, since attention computes in one dtype, or FP8."""
    if config.kv_cache_dtype in FP8_CACHE_DTYPES:
        _check_fp8(config, model)
        return FP8
    own, wanted = compute_weight(model).dtype, choose_dtype(config.kv_cache_dtype)
    if wanted not in (None, own):
        raise ConfigError(
            f"kv_cache_dtype: found {config.kv_cache_dtype!r}, but the model computes in "
            f"{str(own).removeprefix('torch.')}; use auto"
        )
    return own


def _check_fp8(config: EngineConfig, model: TargetModel | Drafter) -> None:
    """Raise ConfigError if the device or the checkpoint does not support keys and values in FP8."""
    device = compute_weight(model).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype: found {config.kv_cache_dtype!r}, which takes a GPU of compute capability 8.9 or more "
            f"(Ada, Hopper); this is {torch.cuda.get_device_name(device)}"
        )
    if not all(math.isfinite(sum(one.spec.kv_scales)) for one in attentions(model)):
        raise ConfigError(
            f"kv_cache_dtype: found {config.kv_cache_dtype!r}, but the checkpoint's k_scale and v_scale are not one "
            "positive number for each layer; use auto"
        )


def _kv_bytes(config: EngineConfig, model: TargetModel | Drafter) -> int:
    """Bytes of one token in a model's KV cache."""
    return model.config.num_layers * model.config.layer.kv_cache.bytes_per_token(_kv_dtype(config, model))
