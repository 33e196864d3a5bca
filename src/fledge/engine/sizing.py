"""How large an engine is: its settings, and what they come to on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fledge.decoding.drafting import TreeShape
from fledge.decoding.params import SamplingParams
from fledge.decoding.tree import tree_size
from fledge.errors import ConfigError, PromptError
from fledge.layers.norm import compute_weight
from fledge.layers.paged_cache import PagedCache
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel

DEFAULT_CPU_CACHE_BYTES = 2 * 2**30
MAX_TREE_ROWS = 64  # what tree attention takes in one pass


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes. `None` is worked out from the device's memory."""

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192  # of prompts, in one step
    block_size: int | None = None  # 64 on a GPU, where attention reads whole pages; 16 on a CPU
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None  # instead of num_blocks
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # no CUDA graphs
    pack_weights: bool = True  # CPU, float32: a second copy of the weights in a faster layout
    max_depth: int = 0  # the deepest drafting the policy may ask for
    tree: TreeShape | None = None
    sample_drafts: bool = False
    read_late: bool | None = None  # read a launch after the next one is under way; None: on a GPU only


@dataclass(frozen=True, kw_only=True)
class RequestBounds:
    """What an engine can take at all, whatever else it does. Knows no engine: it can be asked anywhere."""

    vocab_size: int
    max_model_len: int
    capacity: int  # tokens of KV cache that one request may have

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuse what would otherwise fail in the middle of a step, and take the other requests with it."""
        vocab_size, longest = self.vocab_size, self.max_model_len
        if not prompt:
            raise PromptError("the prompt is empty")
        if len(prompt) >= longest:
            raise PromptError(f"the prompt has {len(prompt)} tokens, but prompt and answer together may have {longest}")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            outside = next(token for token in prompt if not 0 <= token < vocab_size)
            raise PromptError(f"prompt: token id {outside} is outside the vocabulary (0 to {vocab_size - 1})")
        for token in params.logit_bias or ():
            if token >= vocab_size:
                raise ConfigError(f"logit_bias token id: found {token}, allowed is 0 to {vocab_size - 1}")
        wanted = min(len(prompt) + (params.max_tokens or 1), longest)
        if wanted > self.capacity:
            raise PromptError(
                f"the request may need {wanted} tokens of KV cache, which has room for {self.capacity}; "
                "ask for fewer tokens or give the engine more memory"
            )


def make_cache(
    model: TargetModel | Drafter, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
) -> PagedCache:
    """Return a cache for the model's keys and values, in `dtype` or in that which it computes with."""
    weight = compute_weight(model)
    return PagedCache(
        model.config.layer.kv_cache,
        num_layers=model.config.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype or weight.dtype,
        device=weight.device,
    )


def count_blocks(config: EngineConfig, block_size: int, target: TargetModel, drafter: Drafter | None) -> int:
    """As many blocks as memory allows, and no more than all requests at full length could use."""
    if config.num_blocks is not None:
        return config.num_blocks
    models: list[TargetModel | Drafter] = [target] if drafter is None else [target, drafter]
    per_token = sum(
        model.config.num_layers * model.config.layer.kv_cache.bytes_per_token(compute_weight(model).dtype)
        for model in models
    )
    per_block = per_token * block_size
    slack = 3 * (config.max_depth + 1) + scratch_slots(config, tree_nodes(config, target.config.vocab_size))
    useful = config.max_num_seqs * -(-(config.max_model_len + slack) // block_size) + 1
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


def tree_nodes(config: EngineConfig, vocab_size: int) -> int:
    if config.tree is None:
        return 0
    width, budget = config.tree.width, config.tree.budget
    nodes = tree_size(depth=config.max_depth, width=width, budget=budget, vocab_size=vocab_size)
    if nodes + 1 > MAX_TREE_ROWS or width * (config.max_depth - 1) > MAX_TREE_ROWS:
        raise ConfigError(
            f"a tree of width {width}, depth {config.max_depth} and {nodes} nodes is too large: at most "
            f"{MAX_TREE_ROWS - 1} nodes, and width times (depth - 1) at most {MAX_TREE_ROWS}"
        )
    return nodes


def scratch_slots(config: EngineConfig, nodes: int) -> int:
    """Slots beyond a sequence's end that trees are laid out in."""
    return 0 if config.tree is None else max(nodes + 1, config.tree.width * config.max_depth)
