"""What the device is told of a request, and what rows it must not touch."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from fledge.checkpoints.target import save_target
from fledge.decoding.drafting import TreeShape
from fledge.decoding.params import SamplingParams
from fledge.decoding.sampling import SamplingRows, distribution
from fledge.engine import loading
from fledge.engine.config import EngineConfig
from fledge.engine.device_state import DeviceState, check_runs_on
from fledge.engine.request import Request
from fledge.engine.sampler import Sampler, SamplingMode
from fledge.errors import ConfigError
from tests.engine_cases import TREE, VOCAB, drafter, speculation, target
from tests.tiny_models import TARGET_CONFIGS, make_target


def make(tree: TreeShape | None = None) -> DeviceState:
    """Three rows, and blocks of 4 for 8 tokens and 12 of lookahead: 5 in a table, if there are no trees."""
    config = EngineConfig(
        max_num_seqs=3, max_model_len=8, block_size=4, num_blocks=20, speculative_config=speculation(3, tree=tree)
    )
    return DeviceState(config, target(), drafter())


def test_capped_scores_are_refused_on_a_gpu_before_weights_are_read(tmp_path: Path) -> None:
    save_target(make_target(TARGET_CONFIGS["gemma2"]), tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    with (
        mock.patch.object(loading, "choose_device", return_value=torch.device("cuda")),
        pytest.raises(ConfigError, match=r"caps its attention scores .* --device cpu runs it, --engine vllm") as caught,
    ):
        loading.load_own_target(tmp_path / "target", EngineConfig())
    assert "\n" not in str(caught.value)
    check_runs_on(TARGET_CONFIGS["gemma2"], torch.device("cpu"))
    check_runs_on(TARGET_CONFIGS["gemma3"], torch.device("cuda"))


def request(params: SamplingParams, row: int, seed: int = 3, draft_until: int = 9) -> Request:
    return Request(
        id="r",
        prompt=[1],
        params=params,
        seed=seed,
        stop_ids=frozenset(),
        max_length=9,
        draft_until=draft_until,
        row=row,
    )


def snapshot(state: DeviceState) -> dict[str, torch.Tensor]:
    columns = {**vars(state), **vars(state.sampling)}
    del columns["acceptance"]  # nobody's in particular
    return {name: value.clone() for name, value in columns.items() if isinstance(value, torch.Tensor)}


def test_the_settings_of_a_row_are_those_of_the_reference() -> None:
    params = [
        SamplingParams(temperature=0.0, top_k=2),
        SamplingParams(temperature=0.7, top_k=100, top_p=0.3, min_p=0.2),
        SamplingParams(temperature=1.9),
    ]
    state = make()
    seeds = [-(2**63), 2**63 - 1, 5]
    rows = [2, 0, 1]
    state.begin([request(p, row, seed) for p, row, seed in zip(params, rows, seeds, strict=True)])
    logits = torch.randn(3, 6)
    expected = SamplingRows.from_params(params, seeds, vocab_size=VOCAB)
    sampler = Sampler(state, torch.tensor(rows), SamplingMode.SAMPLED)
    assert torch.equal(state.sampling.seed[rows], expected.seed)
    assert torch.equal(sampler.probabilities(logits), distribution(logits, expected))
    plain = Sampler(state, torch.tensor([1]), SamplingMode.SAMPLED)
    assert torch.equal(plain.probabilities(logits[2:]), distribution(logits, expected)[2:])


def test_a_new_owner_finds_no_drafts_and_other_rows_stay_as_they_are() -> None:
    state = make(TREE)
    state.begin([request(SamplingParams(temperature=0.5), row) for row in (0, 1)])
    state.draft_count[:] = 2
    before = snapshot(state)
    state.begin([request(SamplingParams(temperature=0), 1, seed=8, draft_until=0)])
    assert (state.draft_count[1], state.draft_until[1], state.sampling.seed[1]) == (0, 0, 8)
    others = torch.tensor([0, 2, 3])
    for name, value in snapshot(state).items():
        assert torch.equal(value[others], before[name][others]), name


def test_blocks_are_placed_where_they_belong() -> None:
    state = make()
    state.place_blocks([])
    first, last = request(SamplingParams(), 0), request(SamplingParams(), 2)
    first.table.blocks[:] = [7, 8]
    last.table.blocks[:] = [1, 2, 3, 4, 9]
    last.placed_blocks = 4
    state.place_blocks([first, last])
    assert (first.placed_blocks, last.placed_blocks) == (2, 5)
    assert state.block_tables.tolist() == [[7, 8, 0, 0, 0], [0] * 5, [0, 0, 0, 0, 9], [0] * 5]


def test_the_padding_row_belongs_to_nobody_and_writes_to_block_0() -> None:
    state = make()
    assert state.padding_row == 3
    assert len(state.length) == 4
    assert not state.block_tables[state.padding_row].any()
    assert state.draft_until[state.padding_row] == 0  # nothing is ever drafted for it
    assert state.sampling.is_greedy[state.padding_row]
