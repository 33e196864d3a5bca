"""How large an engine's KV cache is: what its settings come to for these models on this machine."""

import torch

from fledge.decoding.drafting import TreeShape
from fledge.decoding.tree import tree_size
from fledge.devices import choose_dtype
from fledge.engine.config import EngineConfig
from fledge.errors import ConfigError
from fledge.layers.norm import compute_weight
from fledge.layers.paged_cache import PagedCache
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel

DEFAULT_CPU_CACHE_BYTES = 2 * 2**30
MAX_TREE_ROWS = 64  # what tree attention takes in one pass


def kv_dtype(config: EngineConfig, model: TargetModel | Drafter) -> torch.dtype:
    """Return the dtype of a model's KV cache. Attention computes in one dtype, so it is the model's own."""
    own, wanted = compute_weight(model).dtype, choose_dtype(config.kv_cache_dtype)
    if wanted not in (None, own):
        raise ConfigError(
            f"kv_cache_dtype: found {config.kv_cache_dtype!r}, but the model computes in "
            f"{str(own).removeprefix('torch.')}; use auto, or that as dtype too"
        )
    return own


def make_cache(config: EngineConfig, model: TargetModel | Drafter, num_blocks: int, block_size: int) -> PagedCache:
    return PagedCache(
        model.config.layer.kv_cache,
        num_layers=model.config.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=kv_dtype(config, model),
        device=compute_weight(model).device,
    )


def count_blocks(
    config: EngineConfig, target: TargetModel, drafter: Drafter | None, *, block_size: int, longest: int
) -> int:
    """As many blocks as memory allows, and no more than all requests at full length, `longest` slots, could use."""
    if config.num_blocks is not None:
        return config.num_blocks
    models: list[TargetModel | Drafter] = [target] if drafter is None else [target, drafter]
    per_token = sum(
        model.config.num_layers * model.config.layer.kv_cache.bytes_per_token(kv_dtype(config, model))
        for model in models
    )
    per_block = per_token * block_size
    useful = config.max_num_seqs * -(-longest // block_size) + 1
    if config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
    elif (device := compute_weight(target).device).type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - total * (1 - config.gpu_memory_utilization))
    else:
        budget = DEFAULT_CPU_CACHE_BYTES
    blocks = min(budget // per_block, useful)
    if blocks < 2:
        raise ConfigError(f"the KV cache has {budget} bytes, but a single block takes {per_block}")
    return blocks


def tree_nodes(tree: TreeShape | None, depth: int, vocab_size: int) -> int:
    """Return how many nodes of a tree are verified; 0: there are chains only."""
    if tree is None:
        return 0
    width = tree.width
    nodes = tree_size(depth=depth, width=width, budget=tree.budget, vocab_size=vocab_size)
    if nodes + 1 > MAX_TREE_ROWS or width * (depth - 1) > MAX_TREE_ROWS:
        raise ConfigError(
            f"a tree of width {width}, depth {depth} and {nodes} nodes is too large: at most "
            f"{MAX_TREE_ROWS - 1} nodes, and width times (depth - 1) at most {MAX_TREE_ROWS}"
        )
    return nodes


def scratch_slots(tree: TreeShape | None, depth: int, nodes: int) -> int:
    """Slots beyond a sequence's end that trees are laid out in."""
    return 0 if tree is None else max(nodes + 1, tree.width * depth)
