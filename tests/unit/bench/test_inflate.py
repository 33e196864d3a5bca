"""An enlarged pair must be the small pair in all it says: states, tokens, drafts, rounds."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.bench.inflate import SHAPES, LayerMap, inflate_drafter, inflate_target, shape_named
from fledge.bench.inflate_files import Inflation, write_inflated
from fledge.checkpoints.drafter import load_drafter, save_drafter
from fledge.checkpoints.target import load_target
from fledge.decoding.drafting import SettledRows, TreeShape, draft_chain, draft_tree
from fledge.decoding.params import SamplingParams
from fledge.decoding.reference import Speculation, generate
from fledge.errors import CheckpointError, ConfigError
from fledge.layers.dense_cache import DenseCache
from fledge.layers.rope import inverse_frequencies
from fledge.models.config import TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel, TargetStates
from tests.tiny_models import TARGET_CONFIGS, TINY_LAYER, TINY_TARGET, drafter_configs, make_drafter, make_target
from tests.unit.bench.offline_cases import SHAPE, write_pair

CPU = torch.device("cpu")


def shape(**layer: int) -> TargetConfig:
    """A shape a few times as large as the tiny target: more of everything, and heads twice as wide."""
    sizes = {"hidden_size": 96, "intermediate_size": 112, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16} | layer
    return replace(TINY_TARGET, layer=replace(TINY_LAYER, **sizes), num_layers=11, vocab_size=150, tied_head=False)


SHAPES_TO_TRY = {
    "everything": shape(),
    "same-head": shape(head_dim=8),
    "kv-heads-repeated": shape(num_heads=8, num_kv_heads=8),  # groups of one: each small KV head serves two
    "groups-of-four": shape(num_heads=16, num_kv_heads=4),
    "width-of-four": replace(shape(head_dim=32), num_layers=8),
    "layers-only": replace(TINY_TARGET, num_layers=13),
    "same-vocabulary": replace(shape(), vocab_size=40),
}


def states_of(target: TargetModel, tokens: torch.Tensor, aux: tuple[int, ...]) -> TargetStates:
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        return target(tokens, positions, DenseCache(target.config.num_layers).extend(positions), aux)


@pytest.mark.parametrize("name", SHAPES_TO_TRY)
def test_the_states_are_the_small_targets_and_zeros(name: str) -> None:
    small = make_target()
    large = inflate_target(small, SHAPES_TO_TRY[name], torch.float32, CPU)
    tokens = torch.randint(40, (30,), generator=torch.Generator().manual_seed(3))
    width, layers = small.config.hidden_size, small.config.num_layers
    ids = tuple(range(layers + 1))
    places = tuple(i * large.config.num_layers // layers for i in ids)
    before, after = states_of(small, tokens, ids), states_of(large, tokens, places)
    assert before.aux is not None
    assert after.aux is not None
    old, new = before.aux.view(30, len(ids), width), after.aux.view(30, len(ids), large.config.hidden_size)
    torch.testing.assert_close(new[..., :width], old, rtol=1e-4, atol=1e-4)
    spare = large.config.vocab_size > small.config.vocab_size
    assert (new[..., width + spare :] == 0).all()
    before_logits, logits = small.logits(before.final), large.logits(after.final)
    torch.testing.assert_close(logits[:, :40], before_logits, rtol=1e-4, atol=1e-3)
    assert large.config.vocab_size == (max(40, SHAPES_TO_TRY[name].vocab_size))
    assert (logits[:, 40:] < -1e6).all()


OTHER_TARGETS = {
    **{name: TARGET_CONFIGS[name] for name in ("llama2", "llama3-tied", "llama-linear-rope")},
    "five-heads-on-one": replace(TINY_TARGET, layer=replace(TINY_LAYER, num_heads=5, num_kv_heads=1)),
}


@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("target", OTHER_TARGETS)
def test_other_targets_of_the_family(target: str, kv_heads: int) -> None:
    small = make_target(OTHER_TARGETS[target])
    large = inflate_target(small, shape(num_kv_heads=kv_heads), torch.float32, CPU)
    tokens = torch.randint(40, (30,), generator=torch.Generator().manual_seed(4))
    expected = small.logits(states_of(small, tokens, ()).final)
    torch.testing.assert_close(large.logits(states_of(large, tokens, ()).final)[:, :40], expected, rtol=1e-4, atol=1e-3)


DRAFTERS = (
    "eagle3", "eagle3.1", "norm-before-residual", "norm-before-fc", "reduced-vocabulary", "own-embedding",
    "shared-head", "two-layers", "four-aux-states",
)  # fmt: skip


def drafts_of(target: TargetModel, drafter: Drafter, prompt: list[int], tree: TreeShape | None) -> list[int]:
    """What is drafted after `prompt`, right or wrong: random drafters are seldom right."""
    tokens = torch.tensor(prompt)
    states = states_of(target, tokens[:-1], drafter.aux_layer_ids)
    with torch.no_grad():
        settled = SettledRows(tokens=tokens[1:], features=drafter.fuse(states), positions=torch.arange(len(prompt) - 1))
        cache = DenseCache(drafter.config.num_layers)
        if tree is not None:
            return draft_tree(drafter, cache, settled, 4, tree).tokens.tolist()
        return draft_chain(drafter, cache, settled, 6).tokens.tolist()


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_same_drafts_and_tokens_in_the_same_rounds(name: str) -> None:
    small = make_target()
    drafter = make_drafter(drafter_configs()[name], small)
    large = inflate_target(small, shape(), torch.float32, CPU)
    large_drafter = inflate_drafter(drafter, small, large, shape=shape())
    params = SamplingParams(temperature=0.0, max_tokens=12)
    for seed, tree in enumerate((None, TreeShape(width=3, budget=8))):
        prompt = torch.randint(40, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
        assert drafts_of(large, large_drafter, prompt, tree) == drafts_of(small, drafter, prompt, tree)
        ours = generate(small, prompt, params, speculation=Speculation(drafter=drafter, depth=4, tree=tree))
        theirs = generate(large, prompt, params, speculation=Speculation(drafter=large_drafter, depth=4, tree=tree))
        assert list(theirs) == list(ours)


def test_the_seed_decides_what_is_random_and_changes_nothing_else() -> None:
    small = make_target()
    one, same, other = (inflate_target(small, shape(), torch.float32, CPU, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.layers[0].mlp.gate_up_proj.weight, other.layers[0].mlp.gate_up_proj.weight)
    # Nothing that is computed is constant: whole rows of zeros could be skipped.
    assert (one.layers[1].mlp.gate_up_proj.weight.std(dim=1) > 0).all()


def test_a_head_twice_as_wide_has_the_narrow_heads_frequencies_bit_for_bit() -> None:
    layers = LayerMap(small=TINY_LAYER, large=shape().layer)
    narrow, _ = inverse_frequencies(TINY_LAYER.rope, 8)
    wide, _ = inverse_frequencies(TINY_LAYER.rope, 16)
    assert torch.equal(wide[layers.dims[:4]], narrow)


def test_five_query_heads_on_one_kv_head_share_it_in_two_groups_of_the_large_shape() -> None:
    small = replace(TINY_LAYER, num_heads=5, num_kv_heads=1)
    layers = LayerMap(small=small, large=replace(TINY_LAYER, num_heads=32, num_kv_heads=8))
    assert layers.query_heads == [0, 1, 2, 3, 4]
    groups = LayerMap(small=small, large=replace(TINY_LAYER, num_heads=8, num_kv_heads=4))
    assert groups.query_heads == [0, 1, 2, 3, 4]
    assert [int(groups.kv_rows(copy)[0]) // 8 for copy in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("config", "target_shape", "message"),
    [
        (TARGET_CONFIGS["qwen3"], shape(), "family 'qwen3'"),
        (TARGET_CONFIGS["llama-biases"], shape(), "biases"),
        (TINY_TARGET, shape(head_dim=12), "heads of 8 dimensions cannot become heads of 12"),
        (TINY_TARGET, replace(shape(), num_layers=7), "8 layers, more than the 7"),
        (TINY_TARGET, shape(hidden_size=16), "hidden_size is 32"),
        (TINY_TARGET, shape(num_heads=2, num_kv_heads=2), "do not fit into 2 on 2"),
    ],
)
def test_what_cannot_be_enlarged_is_refused_in_one_line(
    config: TargetConfig, target_shape: TargetConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        inflate_target(make_target(config), target_shape, torch.float32, CPU)
    assert "\n" not in str(caught.value)


def test_eagle_1_and_unknown_shapes_are_refused() -> None:
    small = make_target()
    large = inflate_target(small, shape(), torch.float32, CPU)
    with pytest.raises(ConfigError, match="EAGLE-1"):
        inflate_drafter(make_drafter(drafter_configs()["eagle1"], small), small, large, shape=shape())
    with pytest.raises(ConfigError, match="unknown shape '8B'"):
        shape_named("8B")
    assert shape_named("8b") is SHAPES["8b"]


def test_a_written_pair_is_labelled_and_loads_as_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = write_pair(tmp_path)
    monkeypatch.setitem(SHAPES, "tiny", SHAPE)
    places = (tmp_path / "large", tmp_path / "large-eagle3", tmp_path / "large-eagle3.1")
    inflation = Inflation(
        source=small.target,
        destination=places[0],
        shape_name="tiny",
        shape=SHAPE,
        drafters=tuple(zip(small.drafters, places[1:], strict=True)),
    )
    write_inflated(inflation)
    target = load_target(Path(small.target))
    expected = inflate_target(target, SHAPE, torch.float32, CPU)
    loaded = load_target(places[0])
    assert loaded.config == expected.config
    assert all(torch.equal(t, expected.state_dict()[n]) for n, t in loaded.state_dict().items())
    assert len(list(places[0].glob("*.safetensors"))) == SHAPE.num_layers + 1
    for source, place in zip(small.drafters, places[1:], strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of the contract: no finding about what was written
            drafter = load_drafter(place, loaded)
        original = load_drafter(Path(source), target)
        prompt = list(range(60, 75))
        assert drafts_of(loaded, drafter, prompt, None) == drafts_of(target, original, prompt, None)
    for place in places:
        label = json.loads((place / "config.json").read_text())["fledge_inflated"]
        assert (label["shape"], label["exact_in"]) == ("tiny", "float32")
        assert json.loads((place / "fledge_provenance.json").read_text())["inflated"]["shape"] == "tiny"
        assert "Not a trained model of this size" in (place / "README.md").read_text()
    assert (places[0] / "tokenizer.json").is_file()
    with pytest.raises(CheckpointError, match="already exists"):
        write_inflated(inflation)


def test_repeated_draft_ids_are_still_refused_without_the_label(tmp_path: Path) -> None:
    small = make_target()
    drafter = make_drafter(drafter_configs()["reduced-vocabulary"], small)
    assert drafter.vocabulary is not None
    drafter.vocabulary.d2t[1] = drafter.vocabulary.d2t[0] - 1
    save_drafter(drafter, tmp_path / "drafter")
    with pytest.raises(CheckpointError, match="draft ids for"):
        load_drafter(tmp_path / "drafter", small)


def test_layers_that_are_taken_are_those_of_the_whole_model_whichever_thread_makes_them() -> None:
    small, threads = make_target(), torch.get_num_threads()
    whole = inflate_target(small, shape(), torch.float32, CPU)
    taken: dict[int, dict[str, torch.Tensor]] = {}

    def take(index: int, layer: torch.nn.Module) -> None:
        taken[index] = {name: tensor.clone() for name, tensor in layer.state_dict().items()}

    def refuse(index: int, layer: torch.nn.Module) -> None:
        raise OSError(f"no room for layer {index}, {type(layer).__name__}")

    ends = inflate_target(small, shape(), torch.float32, CPU, take_layer=take)
    assert sorted(taken) == list(range(whole.config.num_layers))
    for index, layer in enumerate(whole.layers):
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, taken[index][name]), (index, name)
    assert torch.equal(ends.lm_head.weight, whole.lm_head.weight)
    assert {parameter.device.type for parameter in ends.layers.parameters()} == {"meta"}
    with pytest.raises(OSError, match="no room"):
        inflate_target(small, shape(), torch.float32, CPU, take_layer=refuse)
    assert torch.get_num_threads() == threads
