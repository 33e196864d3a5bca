"""What the device is told of a request, and what rows it must not touch."""

import torch

from fledge.decoding.params import SamplingParams
from fledge.decoding.sampling import SamplingRows, distribution
from fledge.engine.request import Request
from fledge.engine.row_state import RowState


def make(**settings: int) -> RowState:
    return RowState(max_requests=3, max_blocks=5, max_depth=2, device=torch.device("cpu"), **settings)


def request(params: SamplingParams, seed: int = 3, draft_until: int = 9) -> Request:
    return Request(
        id="r", prompt=[1], params=params, seed=seed, stop_ids=frozenset(), max_length=9, draft_until=draft_until
    )


def snapshot(state: RowState) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in vars(state).items() if isinstance(value, torch.Tensor)}


def test_the_settings_of_a_row_are_those_of_the_reference() -> None:
    params = [
        SamplingParams(temperature=0.0, top_k=2),
        SamplingParams(temperature=0.7, top_k=100, top_p=0.3, min_p=0.2),
        SamplingParams(temperature=1.9),
    ]
    state = make()
    seeds = [-(2**63), 2**63 - 1, 5]
    state.begin([2, 0, 1], [request(p, seed) for p, seed in zip(params, seeds, strict=True)], vocab_size=6)
    logits = torch.randn(3, 6)
    expected = SamplingRows.from_params(params, seeds, vocab_size=6)
    found = state.sampling_rows(torch.tensor([2, 0, 1]), filtered=True, vocab_size=6)
    assert torch.equal(found.seed, expected.seed)
    assert torch.equal(distribution(logits, found), distribution(logits, expected))
    assert state.sampling_rows(torch.tensor([1]), filtered=False, vocab_size=6).max_top_k == 0


def test_a_new_owner_finds_no_drafts_and_other_rows_stay_as_they_are() -> None:
    state = make(tree_nodes=3)
    state.begin([0, 1], [request(SamplingParams(temperature=0.5))] * 2, vocab_size=6)
    state.draft_count[:] = 2
    before = snapshot(state)
    state.begin([1], [request(SamplingParams(temperature=0), seed=8, draft_until=0)], vocab_size=6)
    assert (state.draft_count[1], state.draft_until[1], state.seed[1]) == (0, 0, 8)
    others = torch.tensor([0, 2, 3])
    for name, value in snapshot(state).items():
        assert torch.equal(value[others], before[name][others]), name


def test_blocks_are_placed_where_they_belong() -> None:
    state = make()
    state.place_blocks([])
    state.place_blocks([(0, 0, 7), (2, 4, 9), (0, 1, 8)])
    assert state.block_tables.tolist() == [[7, 8, 0, 0, 0], [0] * 5, [0, 0, 0, 0, 9], [0] * 5]


def test_the_padding_row_belongs_to_nobody_and_writes_to_block_0() -> None:
    state = make()
    assert state.padding_row == 3
    assert len(state.length) == 4
    assert not state.block_tables[state.padding_row].any()
    assert state.draft_until[state.padding_row] == 0  # nothing is ever drafted for it
    assert state.is_greedy[state.padding_row]
