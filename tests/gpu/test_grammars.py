"""Requests with grammars on a GPU: their rounds are graphs and read one launch late, as those of others.

Also runs as a script where pytest is not:  PYTHONPATH=src:. python tests/gpu/test_grammars.py
"""

import copy
import sys
from unittest import mock

import torch

from fledge.decoding.params import SamplingParams
from fledge.engine import programs
from fledge.layers.dense_cache import DenseCache
from tests.engine_cases import add_request, verify_share
from tests.gpu.script import run_checks
from tests.gpu.test_engine import CONFIG, agreeing_pair, make_engine, on_gpu
from tests.grammar_cases import Automaton


def grammars_have_graphs_and_late_reading() -> None:
    """Beside plain requests: every token is allowed, and the best of these by float64 but for near-ties."""
    cpu, drafts = agreeing_pair()
    (target, drafter), exact, vocab = on_gpu(cpu, drafts, torch.float32), copy.deepcopy(cpu).double(), CONFIG.vocab_size
    turns = {turn: dict.fromkeys(range(turn, vocab, 2), 1 - turn) for turn in (0, 1)}  # even ids, odd ones
    with mock.patch.object(programs, "HostSampler", None):
        for seqs, budgets in ((16, False), (4, True)):
            engine = make_engine(target, drafter, lambda _: 3, max_num_seqs=seqs)
            if budgets:
                verify_share(engine, 0.5)
            params = SamplingParams(temperature=0, max_tokens=60)
            constraints = [Automaton(turns, vocab) if i % 3 == 0 else None for i in range(12)]
            requests = [
                add_request(engine, str(i), [i, 7, 9], params, constraint=one) for i, one in enumerate(constraints)
            ]
            while engine.has_unfinished:
                engine.step()
                engine.check_integrity()
            for request, constraint in zip(requests, constraints, strict=True):
                tokens, positions = torch.tensor(request.tokens), torch.arange(len(request.tokens))
                cache = DenseCache(exact.config.num_layers, torch.device("cpu"))
                logits = exact.logits(exact(tokens, positions, cache.extend(positions)).final)[2:-1]
                if constraint is not None:
                    ids, turn = torch.arange(vocab), torch.arange(len(logits)) % 2
                    logits = logits.masked_fill(ids % 2 != turn[:, None], -torch.inf)
                behind = logits.amax(-1) - logits.gather(1, tokens[3:, None])[:, 0]
                assert request.num_output == 60
                assert behind.max() < 1e-3, f"{request.id}: {behind.max()} behind the best at {behind.argmax()}"
            held = [one for one in requests if one.constraint is not None]
            assert sum(sum(one.acceptance.accepted_by_depth) for one in held) > 5, "no draft stood: little was tested"


if "pytest" in sys.modules:
    import pytest

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_grammars() -> None:
        with torch.no_grad():
            grammars_have_graphs_and_late_reading()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    with torch.no_grad():
        sys.exit(
            run_checks({"grammars_have_graphs_and_late_reading": grammars_have_graphs_and_late_reading}, sys.argv[1:])
        )
