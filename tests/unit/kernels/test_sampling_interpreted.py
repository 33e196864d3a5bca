"""Drawing and judging under Triton's interpreter. What each case means is said in `sampling_cases.py`."""

import os
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is for machines without a GPU: see tests/gpu", allow_module_level=True)

from tests.engine_cases import AnyDepth, add_request, drafter, greedy, make_engine, run, sampled, verify_share
from tests.unit.kernels import sampling_cases as cases

CPU = "cpu"
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(9, 11), (12, 9001)])
@pytest.mark.parametrize("filtering", [False, True])
def test_sample(rows, vocab, filtering, dtype):
    cases.sample(rows, vocab, dtype, CPU, filtering=filtering)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(24, 64), (12, 9001)])
def test_bounds(rows, vocab, dtype):
    cases.bounds(rows, vocab, dtype, CPU)


@pytest.mark.parametrize("seed", [1, 13, 58, 65])
def test_bounds_at_logits_that_a_division_rounded_twice_would_miss(seed):
    """Floors are logits over temperatures, to the bit: the kernel's division is rounded once, as torch's is."""
    torch.manual_seed(seed)
    cases.bounds(24, 64, torch.float32, CPU)


def test_bounds_where_the_smallest_number_stays_one():
    cases.bounds(24, 64, torch.float32, CPU, temperature=1.2)


def test_probabilities():
    cases.probabilities(7, 2500, CPU)


@pytest.mark.parametrize("filtering", [False, True])
@pytest.mark.parametrize(("batch", "depth", "flat"), [(9, 3, False), (6, 1, True)])
def test_reject(batch, depth, flat, filtering):
    cases.reject(batch, depth, 1500, CPU, filtering=filtering, flat=flat)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flat", [False, True])
def test_adjust(flat, dtype):
    cases.adjust(5, 3, 2100, dtype, CPU, flat=flat)
    cases.adjust(3, 1, 40, dtype, CPU, flat=flat)


@pytest.mark.parametrize("share", [None, 0.5])
def test_an_engine_gives_the_same_tokens_by_kernels(share):
    """Greedy, sampled and filtering requests in one batch, drafts drawn or not, all verified or some."""
    asks = [
        greedy([2, 3, 4], 9),
        sampled([5], 9, seed=1),
        sampled([4, 4], 9, seed=2, top_k=3, top_p=0.8),
        sampled([3], 9, seed=3, min_p=0.1, temperature=1.3),
        greedy([2, 2], 9, repetition_penalty=1.4),
        sampled([1, 5], 9, seed=4, presence_penalty=0.7, top_p=0.9),
    ]

    def outputs() -> list[list[int]]:
        policy = AnyDepth(lambda _: 3, sampled=lambda one: one.seed != 3)
        engine = make_engine(drafts=drafter(), policy=policy, sample_drafts=None, max_num_seqs=8, graphs=True)
        verify_share(engine, share)
        requests = [add_request(engine, str(i), ask.prompt, ask.params, seed=ask.seed) for i, ask in enumerate(asks)]
        run(engine)
        assert sum(one.accepted for request in requests for one in request.rounds) > 3
        assert sum(one.sample_drafts for one in requests) == 3
        return [one.output for one in requests]

    expected = outputs()
    with ExitStack() as patched:
        for module in ("engine.sampler", "kernels.sample", "kernels.filters"):
            patched.enter_context(mock.patch(f"fledge.{module}.runs_triton", return_value=True))
        assert outputs() == expected
