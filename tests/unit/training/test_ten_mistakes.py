"""The ten mistakes that other trainers made, each with the tests that would catch it here; four of them are below.

docs/training.md tells them one by one. `CAUGHT_BY` names tests as `file::test`, and a test makes sure that they exist:
renaming or dropping one shows.
"""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.checkpoints.drafter import load_drafter, save_drafter
from fledge.checkpoints.reading import read_drafter
from fledge.checkpoints.target import load_target, save_target
from fledge.errors import CheckpointWarning
from fledge.layers.config import RopeConfig
from fledge.models.drafter.variants import build
from fledge.training.capture import open_target, target_config
from fledge.training.data.examples import PackedBatch
from fledge.training.drafter_setup import drafter_config
from fledge.training.recipe import DrafterSection, TargetSection
from tests.tiny_models import TINY_LAYER, TINY_TARGET, make_target

HERE = Path(__file__).parent
CAUGHT_BY = {
    "1 norm_output normed only before the head, fed back without": (
        "test_train_serve_parity.py::test_logits_at_every_depth_are_those_of_serving",
        "test_train_serve_parity.py::test_feeding_back_before_the_norm_would_be_noticed",
    ),
    "2 loss mask unshifted: the first draft after the prompt never trained": (
        "test_ttt.py::test_the_first_drafts_after_the_prompt_are_taught",
        "data/test_store_and_packing.py::test_the_first_drafted_position_after_the_prompt_is_taught",
    ),
    "3 draft keys of other slots stay visible": (
        "test_attention.py::test_draft_keys_of_other_slots_have_no_influence",
        "test_attention.py::test_outputs_and_gradients_are_those_of_the_written_out_mask",
    ),
    "4 aux ids count outputs here and inputs there": (
        "test_ten_mistakes.py::test_aux_id_k_is_the_input_of_block_k_whichever_library_runs_the_target",
        "test_ten_mistakes.py::test_aux_ids_reach_the_checkpoint_in_both_conventions",
    ),
    "5 final state before the norm in one library, after it in another": (
        "test_ten_mistakes.py::test_the_final_state_is_what_the_head_reads",
    ),
    "6 max_position_embeddings smaller than what is served": (
        "test_ten_mistakes.py::test_positions_are_the_target_s_and_fewer_are_warned_of",
        "../../e2e/test_train.py::test_the_drafter_s_config_says_what_the_target_is",
    ),
    "7 rope_theta nested by transformers 5 and read as 10000": (
        "test_ten_mistakes.py::test_rope_survives_from_either_spelling_to_the_written_config",
        "../../e2e/test_train.py::test_the_drafter_s_config_says_what_the_target_is",
    ),
    "8 several denominators, several acceptance lengths": (
        "test_ttt.py::test_any_split_of_a_batch_gives_the_same_gradient",
        "test_metrics.py::test_acceptance_is_the_shared_definition",
        "test_parallel.py::test_two_processes_train_like_one",
    ),
    "9 draft vocabulary cached in a file not keyed to the data": (
        "test_stage_vocab.py::test_a_vocabulary_is_refused_for_other_data_or_another_target",
        "test_ten_mistakes.py::test_other_data_is_another_vocabulary",
    ),
    "10 generation-prompt boilerplate supervised": (
        "data/test_rendering.py::test_the_mask_covers_each_answer_and_its_end_token_only",
        "data/test_rendering.py::test_the_think_opener_of_the_generation_prompt_is_not_supervised",
        "data/test_rendering.py::test_rewritten_history_makes_each_turn_an_example_of_its_own",
    ),
}


@pytest.mark.parametrize("mistake", CAUGHT_BY)
def test_the_tests_that_catch_it_exist(mistake: str) -> None:
    assert CAUGHT_BY[mistake]
    for name in CAUGHT_BY[mistake]:
        file, _, test = name.partition("::")
        tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_no_mistake_is_left_out() -> None:
    assert [int(mistake.split()[0]) for mistake in CAUGHT_BY] == list(range(1, 11))


@pytest.fixture(scope="module", name="target")
def _target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("models") / "target"
    layer = replace(TINY_LAYER, rope=RopeConfig(theta=31337.0))
    save_target(make_target(replace(TINY_TARGET, layer=layer, max_positions=300)), directory)
    return directory


def packed(tokens: torch.Tensor) -> PackedBatch:
    """One document that fills its row: [1, length]."""
    length = tokens.shape[1]
    return PackedBatch(
        tokens=tokens,
        answer=torch.ones_like(tokens, dtype=torch.bool),
        document=torch.zeros_like(tokens),
        positions=torch.arange(length)[None],
    )


def transformers_states(directory: Path, tokens: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states and logits by transformers alone, none of our code between."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True)
    return list(out.hidden_states), out.logits


@pytest.mark.parametrize("backend", ["fledge", "transformers"])
def test_aux_id_k_is_the_input_of_block_k_whichever_library_runs_the_target(target: Path, backend: str) -> None:
    tokens = torch.randint(40, (1, 9))
    inputs, _ = transformers_states(target, tokens)
    ids = (0, 2, 4, 7)
    states = open_target(TargetSection(path=str(target), backend=backend), "cpu").states(packed(tokens), ids)  # type: ignore[arg-type]
    assert states.aux is not None
    for k, chunk in zip(ids, states.aux.chunk(len(ids), dim=-1), strict=True):
        torch.testing.assert_close(chunk, inputs[k], atol=1e-4, rtol=1e-4)
        assert not torch.allclose(chunk, inputs[k + 1], atol=1e-2)  # the test could tell


@pytest.mark.parametrize("backend", ["fledge", "transformers"])
def test_the_final_state_is_what_the_head_reads(target: Path, backend: str) -> None:
    tokens = torch.randint(40, (1, 9))
    _, logits = transformers_states(target, tokens)
    capture = open_target(TargetSection(path=str(target), backend=backend), "cpu")  # type: ignore[arg-type]
    states = capture.states(packed(tokens), (8,))
    torch.testing.assert_close(states.final @ capture.ends.head_weight.T, logits, atol=1e-4, rtol=1e-4)
    assert states.aux is not None
    assert not torch.allclose(states.aux @ capture.ends.head_weight.T, logits, atol=1e-1)  # the stream before the norm


def test_aux_ids_reach_the_checkpoint_in_both_conventions(target: Path, tmp_path: Path) -> None:
    """Layer inputs at the top level, where vLLM reads them; outputs in `eagle_config`, where SGLang does."""
    section = DrafterSection(aux_layer_ids=(1, 3, 6))
    config = drafter_config(section, target_config(TargetSection(path=str(target))))
    save_drafter(build(config), tmp_path / "drafter")
    written = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
    assert load_drafter(tmp_path / "drafter", load_target(target)).aux_layer_ids == (1, 3, 6)


def test_positions_are_the_target_s_and_fewer_are_warned_of(target: Path, tmp_path: Path) -> None:
    served = target_config(TargetSection(path=str(target)))
    save_drafter(build(drafter_config(DrafterSection(), served)), tmp_path / "drafter")
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["max_position_embeddings"] == 300
    with pytest.warns(CheckpointWarning, match="acceptance collapses on longer inputs"):
        drafter_config(DrafterSection(max_positions=128), served)


@pytest.mark.parametrize("spelling", ["transformers 4", "transformers 5"])
def test_rope_survives_from_either_spelling_to_the_written_config(target: Path, tmp_path: Path, spelling: str) -> None:
    values = json.loads((target / "config.json").read_text())
    theta = values.pop("rope_theta")
    assert theta == 31337.0
    values |= (
        {"rope_theta": theta}
        if spelling == "transformers 4"
        else {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    )
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(values))
    config = drafter_config(DrafterSection(), target_config(TargetSection(path=str(tmp_path / "target"))))
    save_drafter(build(config), tmp_path / "drafter")
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["rope_theta"] == theta
    assert read_drafter(tmp_path / "drafter").config.layer.rope == RopeConfig(theta=theta)


def test_other_data_is_another_vocabulary(tmp_path: Path) -> None:
    """The stage's key follows from the data, so no old vocabulary can be picked up."""
    from fledge.training.pipeline import Pipeline
    from fledge.training.recipe import Recipe
    from tests.tiny_training import write_run

    recipe = Recipe.load(write_run(tmp_path))
    before = Pipeline(recipe).states()
    with (tmp_path / "data.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"messages": [{"role": "user", "content": "something new"}]}\n')
    after = Pipeline(recipe).states()
    assert before["vocab"].directory != after["vocab"].directory
    assert before["fit"].directory != after["fit"].directory
