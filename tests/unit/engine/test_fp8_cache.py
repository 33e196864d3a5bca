"""Keys and values in eight bits: the engine's tokens and acceptance are those of the reference loop that rounds alike.

What happens to such caches in any order is in `test_engine_state_machine.py`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fledge.decoding import reference
from fledge.decoding.reference import Round, Speculation
from fledge.engine.device_state import DeviceState
from fledge.engine.swap import is_same_build
from fledge.kernels.cache_codes import FP8, FP8_MAX, decode, encode
from fledge.layers.block import attentions
from tests.engine_cases import (
    MAX_LENGTH,
    TREE,
    Ask,
    answer_of,
    answers,
    drafter,
    greedy,
    make_engine,
    run,
    sampled,
    target,
)
from tests.unit.engine.test_swap import ASKS, prepared

MIX = [greedy((2, 3, 4, 5, 0, 2, 3, 4, 5), 16), sampled([3, 3, 2], 14, seed=1), greedy([5, 4, 1, 1, 2], 12)]


def rounds_of(ask: Ask, speculation: Speculation | None) -> list[Round]:
    """Not those that other tests keep: scales are changed here."""
    with torch.inference_mode():
        return list(
            reference.generate(
                target(),
                ask.prompt,
                ask.params,
                seed=ask.seed,
                speculation=speculation,
                max_length=MAX_LENGTH,
                eos_ids=ask.eos_ids,
                kv_cache_dtype=FP8,
            )
        )


def tokens_of(rounds: list[Round]) -> list[int]:
    return [token for done in rounds for token in done.tokens]


@pytest.mark.parametrize("settings", [{}, {"tree": TREE}], ids=["chain", "tree"])
def test_tokens_and_acceptance_are_the_references(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for layer, one in enumerate([*attentions(target()), *attentions(drafter())]):
        monkeypatch.setattr(one, "spec", replace(one.spec, kv_scales=(0.3 / (layer + 1), 0.002)))
    engine = make_engine(drafts=drafter(), kv_cache_dtype="fp8_e4m3", **settings)
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(MIX)]
    run(engine)
    assert engine.runner.state.target_cache.keys.dtype == FP8
    for ask, request in zip(MIX, requests, strict=True):
        rounds = rounds_of(ask, Speculation(drafter=drafter(), depth=3, **settings))
        assert request.output == tokens_of(rounds) == tokens_of(rounds_of(ask, None))
        accepted = sum(done.accepted for done in rounds)
        assert sum(n * count for (_, n), count in request.acceptance.tally.items()) == accepted
    assert [request.output for request in requests] != [answer_of(ask)[0] for ask in MIX], "nothing was rounded"


def test_there_are_as_many_more_blocks_as_a_row_takes_fewer_bytes() -> None:
    room = {"num_blocks": None, "kv_cache_bytes": 2**14, "max_num_seqs": 100}
    wide, narrow = (make_engine(drafts=drafter(), kv_cache_dtype=kind, **room) for kind in ("auto", "fp8"))
    state: DeviceState = narrow.runner.state
    assert state.num_blocks == 8 * wide.runner.state.num_blocks  # of float64
    caches = state.target_cache, state.drafter_cache
    assert sum(side.nbytes for cache in caches if cache is not None for side in (cache.keys, cache.values)) <= 2**14


def test_another_drafter_takes_over() -> None:
    engine = make_engine(drafts=drafter("eagle3"), kv_cache_dtype="fp8", read_late=True)
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(ASKS)]
    for _ in range(3):
        engine.step()
    engine.exchange_drafter(prepared("eagle3.1"))
    run(engine)
    expected = [answer_of(ask, kv_cache_dtype="fp8")[0] for ask in ASKS]
    assert [request.output for request in requests] == expected == answers(engine, ASKS)


def test_graphs_are_not_kept_for_other_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = drafter("eagle3"), drafter("eagle3", 20)
    monkeypatch.setattr(other, "config", one.config)
    assert is_same_build(one, other)
    attention = attentions(other)[0]
    monkeypatch.setattr(attention, "spec", replace(attention.spec, kv_scales=(2.0, 1.0)))
    assert not is_same_build(one, other)


def test_codes_saturate_and_keep_what_is_no_number() -> None:
    rows = torch.tensor([1.0, -3.3, 1e9, -torch.inf, torch.nan, 1e-9])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        stored = encode(rows.to(dtype), FP8, 0.5)
        found = decode(stored, dtype, 0.5).float()
        torch.testing.assert_close(found, torch.tensor([1.0, -3.25, 224, -224, torch.nan, 0.0]), equal_nan=True)
        assert stored.float().nan_to_num().abs().max() == FP8_MAX
        assert torch.equal(encode(rows.to(dtype), torch.float32, 0.5).nan_to_num(), rows.to(dtype).float().nan_to_num())
