"""The probe's replay on a GPU: does it draft what the engine drafted, and what does it cost?

Also runs as a script where pytest is not:  PYTHONPATH=src:. python tests/gpu/test_drift.py [part of a name ...]
"""

import os
import sys
import time

import torch

if torch.cuda.is_available():
    os.environ.pop("TRITON_INTERPRET", None)

from fledge.bench.rounds import make_pair
from fledge.drift.prompts import Segment
from fledge.drift.replay import FinishedText, Replay, target_states
from tests.engine_cases import greedy
from tests.gpu.test_engine import agreeing_pair, make_engine, on_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEAST_AGREEMENT = {torch.float32: 0.99, torch.bfloat16: 0.9}  # near-ties fall either way, in bfloat16 quite a few


def replay_agrees(dtype: torch.dtype) -> None:
    pair = agreeing_pair()
    target, drafter = on_gpu(*pair, dtype) if DEVICE == "cuda" else pair
    engine = make_engine(target, drafter, lambda _running: 4)
    requests = [greedy([i + 2, 7, 3 * i + 1], max_tokens=100).submit(engine, str(i)) for i in range(8)]
    while engine.has_unfinished:
        engine.step()
    rounds = agreeing = accepted = 0
    texts = [request.tokens for request in requests]
    texts = [
        FinishedText(
            states=states,
            tokens=request.tokens,
            segments=[Segment.OUTPUT] * len(request.tokens),
            starts=[record.start for record in request.rounds],
        )
        for request, states in zip(requests, target_states(target, texts, drafter.aux_layer_ids), strict=True)
    ]
    replay = Replay(drafter, texts, max_scores=10_000)
    drafted = replay.draft([text.starts for text in texts], 6)
    for request, leading, found in zip(requests, replay.matching_drafts(4), drafted, strict=True):
        for record, count in zip(request.rounds, leading, strict=True):
            # What the last round accepts beyond the text's end the text does not tell.
            agreeing += count == min(record.accepted, len(request.tokens) - record.start)
        rounds += len(leading)
        accepted += sum(record.accepted for record in request.rounds)
        torch.testing.assert_close(found.mass.sum(-1), torch.ones_like(found.entropy), atol=1e-4, rtol=0)
    print(f"    {dtype}: {agreeing} of {rounds} rounds agree, {accepted} drafts accepted")
    assert accepted > rounds / 4
    assert agreeing / rounds >= LEAST_AGREEMENT[dtype]


def cost() -> None:
    """Print seconds and memory of replaying 64 rounds at depth 12, by context. An 8B shape, bfloat16."""
    shape = "8b" if DEVICE == "cuda" else "29m"
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    target, drafter = make_pair(shape, dtype, torch.device(DEVICE))
    for length in (1024, 4096, 32768, 131072) if DEVICE == "cuda" else (512,):
        tokens = torch.randint(0, 8000, (length,)).tolist()
        segments = [Segment.PROMPT] * (length - 128) + [Segment.OUTPUT] * 128
        for _ in range(2):  # the second time kernels are compiled
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            (states,) = target_states(target, [tokens], drafter.aux_layer_ids)
            starts = range(length - 127, length + 1, 2)
            text = FinishedText(states=states, tokens=tokens, segments=segments, starts=starts)
            (found,) = Replay(drafter, [text]).draft([starts], 12)
            seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
        print(f"    {shape} {length}: {seconds:.2f} s, peak {peak:.1f} GiB with weights")
        assert found.mass.sum(-1).sub(1).abs().max() < 1e-2


CHECKS = {
    "float32": lambda: replay_agrees(torch.float32),
    "bfloat16": lambda: replay_agrees(torch.bfloat16),
    "cost": cost,
}

if "pytest" in sys.modules:
    import pytest

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("name", CHECKS)
    def test_drift(name: str) -> None:
        with torch.no_grad():
            CHECKS[name]()


if __name__ == "__main__":
    for check_name, check in CHECKS.items():
        if len(sys.argv) == 1 or any(part in check_name for part in sys.argv[1:]):
            print(check_name, flush=True)
            with torch.no_grad():
                check()
