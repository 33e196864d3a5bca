"""What an engine samples of the drafter's state as it serves is what the probe finds by replaying the same rounds."""

from collections.abc import Sequence

import pytest
import torch

from fledge.decoding.drafter_statistics import StateGrowth
from fledge.drift.prompts import Segment
from fledge.drift.replay import FinishedText, Replay, target_states
from fledge.engine import runner
from tests import engine_cases

DEPTH = 3


@pytest.mark.parametrize("name", ["eagle3", "eagle3.1"])
def test_an_engine_samples_the_states_that_the_probe_replays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[Sequence[float]] = []
    plus = StateGrowth.plus
    monkeypatch.setattr(StateGrowth, "plus", lambda self, given: norms.append(given) or plus(self, given))
    monkeypatch.setattr(runner, "SAMPLED_ROUNDS", 1)
    drafter = engine_cases.drafter(name)
    engine = engine_cases.make_engine(drafts=drafter, depth=DEPTH)
    request = engine_cases.greedy([2, 3, 4], 24).submit(engine, "0")
    engine_cases.run(engine)
    # A round samples the drafts of the next; those of the first came with the prompt, those of the last went nowhere.
    starts = [record.start for record in request.rounds[1:]]
    assert len(norms) == len(starts) + 1 > 5
    segments = [Segment.SINK] * len(request.tokens)
    (states,) = target_states(engine_cases.target(), [request.tokens], drafter.aux_layer_ids)
    text = FinishedText(states=states, tokens=request.tokens, segments=segments, starts=starts)
    found = Replay(drafter, [text]).draft([starts], DEPTH)[0].hidden_rms
    width = drafter.config.hidden_size
    torch.testing.assert_close(torch.tensor(norms[:-1]) / width**0.5, found.float(), rtol=1e-3, atol=1e-4)
    growth = engine.stats().state_growth
    assert growth.by_depth == pytest.approx([sum(n[d] for n in norms) / sum(n[0] for n in norms) for d in range(DEPTH)])
