"""Targets over blocks as a GPU runs them, under Triton's interpreter, against the dense cache in torch."""

import os
from dataclasses import replace

import pytest
import torch

if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("tests/gpu runs the kernels themselves", allow_module_level=True)

from fledge.kernels.cache_codes import FP8
from fledge.layers.block import attentions, join_weights
from fledge.layers.dense_cache import DenseCache
from fledge.layers.paged_cache import ChunkPass, MixedPass, PagedCache, RoundPass
from tests.tiny_models import TARGET_CONFIGS, make_target
from tests.unit.kernels.interpreter import in_triton


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *[("gpt-oss", FP8), ("gemma3", None), ("deepseek-v2", FP8), ("llama4", None)],
        *[("granite", None), ("smollm3", FP8), ("ernie4.5-moe", None)],
        *[("exaone4", None), ("olmoe", None), ("dots1", None)],
    ],
)
@torch.no_grad()
def test_a_prompt_and_a_round_with_another_prompt(name: str, dtype: torch.dtype | None) -> None:
    """Sinks, heads that torch finishes, ropes and windows of some layers, latent rows, chunks: all reach kernels.

    So do keys and values in eight bits, with scales, and a lone row, whose experts are chosen in another place.
    """
    config = TARGET_CONFIGS[name]
    both_kinds = slice(2, 4)  # of a family that has two kinds of layers
    target = make_target(
        replace(
            config,
            num_layers=2,
            layers=config.layers[both_kinds],
            sliding_windows=config.sliding_windows[both_kinds],
        )
    )
    for one in attentions(target):
        one.spec = replace(one.spec, kv_scales=(0.5, 0.5 if config.layer.latent else 0.02))
    tokens, positions = torch.randint(0, config.vocab_size, (14,)), torch.arange(14)
    expected = target(tokens, positions, DenseCache(2, dtype=dtype).extend(positions)).final

    join_weights(target)
    kept, device = dtype or torch.float32, torch.device("cpu")
    cache = PagedCache(config.layer.kv_cache, num_layers=2, num_blocks=9, block_size=4, dtype=kept, device=device)
    tables = torch.tensor([[5, 2, 4, 1], [3, 8, 6, 7]], dtype=torch.int32)
    slots = tables[:, positions // 4].long() * 4 + positions % 4

    def prompt(row: int) -> ChunkPass:
        return ChunkPass(
            cache=cache,
            block_tables=tables[row : row + 1],
            context_lens=torch.tensor([0]),
            slots=slots[row, :11],
            query_starts=torch.tensor([0, 11]),
            max_chunk=11,
            max_context=16,
        )

    def round_(first: int, end: int) -> RoundPass:
        return RoundPass(
            cache=cache,
            block_tables=tables[:1],
            context_lens=torch.tensor([first]),
            slots=slots[0, first:end],
            rows=end - first,
            max_context=16,
        )

    both = torch.cat([positions[11:13], positions[:11]]), MixedPass(round=round_(11, 13), chunks=prompt(1))
    for rows, storage in ((positions[:11], prompt(0)), both, (positions[13:], round_(13, 14))):
        found = in_triton(target)(tokens[rows], rows, storage).final
        torch.testing.assert_close(found, expected[rows], atol=1e-4, rtol=1e-4)
