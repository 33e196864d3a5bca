"""Hidden states on disk: the same numbers as from the target, announced, checked, resumable."""

import shutil
from collections import namedtuple
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fledge.errors import FledgeError
from fledge.files import SEAL_BYTES
from fledge.progress import Progress
from fledge.training.capture import FledgeCapture
from fledge.training.data.examples import TokenStore, collate, packed_rows
from fledge.training.data.loader import HiddenStateStore, captured_states, plan_states, write_states
from fledge.training.recipe import DrafterSection, Recipe
from tests.fit_cases import make_inputs, offline, run_capture, write_store
from tests.tiny_models import TINY_TARGET, make_target

AUX = (2, 4, 5)


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> TokenStore:
    return write_store(tmp_path / "examples")


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    (tmp_path / "states").mkdir()
    return tmp_path / "states"


def fill(directory: Path, store: TokenStore, capture: FledgeCapture, aux: tuple[int, ...] = AUX) -> str:
    """Write states; returns what was said."""
    said = StringIO()
    progress = Progress(Console(file=said, width=200, highlight=False))
    config = replace(capture.config, dtype=str(capture.ends.head_weight.dtype).removeprefix("torch."))
    form = plan_states(store, config, "a target", aux, shard_tokens=200)
    write_states(directory, store, capture.ends, form, captured_states(store, capture, form, 100), progress=progress)
    return said.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("aux", [AUX, ()])
def test_states_from_disk_are_those_of_the_target(
    directory: Path, store: TokenStore, dtype: torch.dtype, aux: tuple[int, ...]
) -> None:
    """Rows cut at 24 tokens too. Tolerance: passes of other shapes sum in another order, and eight
    layers of large random weights spread that; states of another token or layer differ by 1 and more.
    """
    capture = FledgeCapture(make_target().to(dtype))
    fill(directory, store, capture, aux)
    states = HiddenStateStore(directory, store, target="a target", aux_layer_ids=aux)
    for length in (64, 24):
        rows = packed_rows(store.lengths, length=length, seed=3, epoch=1)
        batch = collate(store, rows, length)
        found, expected = states.read(rows, length), capture.states(batch, aux)
        tolerance = {torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.3}[dtype]
        real = batch.document >= 0
        assert found.final.dtype == dtype
        torch.testing.assert_close(found.final[real], expected.final[real], atol=tolerance, rtol=tolerance)
        assert (found.aux is None) == (not aux)
        if found.aux is not None and expected.aux is not None:
            torch.testing.assert_close(found.aux[real], expected.aux[real], atol=tolerance, rtol=tolerance)
            assert not found.aux[~real].any()


def test_bytes_are_announced_before_they_are_written(directory: Path, store: TokenStore) -> None:
    said = fill(directory, store, FledgeCapture(make_target()))
    size = store.total_tokens * 4 * 32 * 4
    assert f"{size:,} bytes of hidden states" in said
    shards = sorted(directory.glob("shard-*.bin"))
    assert sum(path.stat().st_size - SEAL_BYTES for path in shards) == size
    assert len(shards) > 2


def test_a_full_disk_is_noticed_before_anything_is_written(
    directory: Path, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(2 << 30, 1 << 30, 1 << 30))
    with pytest.raises(FledgeError, match=r"do not fit on this disk .* use capture\.mode=online"):
        fill(directory, store, FledgeCapture(make_target()))
    assert not list(directory.glob("shard-*"))


def test_an_interrupted_capture_goes_on_with_the_missing_shards(
    directory: Path, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = FledgeCapture(make_target())
    fill(directory, store, capture)
    whole = {path.name: path.read_bytes() for path in directory.glob("shard-*.bin")}
    (directory / "shard-00001.bin").rename(directory / ".shard-00001.bin.killed.tmp.bin")
    (directory / "shard-00002.bin").write_bytes(b"cut")
    passes = 0
    states = FledgeCapture.states

    def counted(self: FledgeCapture, *arguments: object) -> object:
        nonlocal passes
        passes += 1
        return states(self, *arguments)

    monkeypatch.setattr(FledgeCapture, "states", counted)
    fill(directory, store, capture)
    assert {path.name: path.read_bytes() for path in directory.glob("shard-*.bin")} == whole
    assert 0 < passes <= 8  # two shards of 200 tokens, in passes of 100 or less
    assert not list(directory.glob(".*"))


def test_states_of_something_else_are_refused(directory: Path, store: TokenStore, tmp_path: Path) -> None:
    capture = FledgeCapture(make_target())
    with pytest.raises(FledgeError, match="run the capture stage first"):
        HiddenStateStore(directory, store, target="a target", aux_layer_ids=AUX)
    fill(directory, store, capture)
    with pytest.raises(FledgeError, match="target is 'a target', expected 'another'"):
        HiddenStateStore(directory, store, target="another", aux_layer_ids=AUX)
    with pytest.raises(FledgeError, match=r"aux_layer_ids is \[2, 4, 5\], expected \[1, 4, 5\]"):
        HiddenStateStore(directory, store, target="a target", aux_layer_ids=(1, 4, 5))
    other = write_store(tmp_path / "other", examples=39)
    with pytest.raises(FledgeError, match=r"examples is .* capture again"):
        HiddenStateStore(directory, other, target="a target", aux_layer_ids=AUX)
    (directory / "shard-00000.bin").write_bytes(b"cut")
    with pytest.raises(FledgeError, match=r"shard-00000\.bin: missing or incomplete"):
        HiddenStateStore(directory, store, target="a target", aux_layer_ids=AUX)


@pytest.mark.parametrize("name", ["shard-00001.bin", "target.safetensors"])
def test_a_flipped_byte_is_noticed_when_it_is_opened(directory: Path, store: TokenStore, name: str) -> None:
    fill(directory, store, FledgeCapture(make_target()))
    content = bytearray((directory / name).read_bytes())
    content[len(content) // 2] ^= 1
    (directory / name).write_bytes(bytes(content))
    with pytest.raises(FledgeError, match=rf"{name}: damaged, .*capture again"):
        HiddenStateStore(directory, store, target="a target", aux_layer_ids=AUX).ends("cpu")


def test_states_of_another_target_are_written_anew(directory: Path, store: TokenStore) -> None:
    fill(directory, store, FledgeCapture(make_target()))
    before = (directory / "shard-00000.bin").read_bytes()
    fill(directory, store, FledgeCapture(make_target(seed=5)), aux=(1, 4, 5))
    assert (directory / "shard-00000.bin").read_bytes() != before
    HiddenStateStore(directory, store, target="a target", aux_layer_ids=(1, 4, 5))


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_kept_with_the_states(directory: Path, store: TokenStore, tied: bool) -> None:
    target = make_target(replace(TINY_TARGET, tied_head=tied))
    fill(directory, store, FledgeCapture(target))
    ends = HiddenStateStore(directory, store, target="a target", aux_layer_ids=AUX).ends("cpu")
    torch.testing.assert_close(ends.embedding_weight, target.embed_tokens.weight, atol=0, rtol=0)
    torch.testing.assert_close(ends.head_weight, target.lm_head.weight, atol=0, rtol=0)


@pytest.fixture(name="recipe")
def _recipe(tmp_path: Path) -> Recipe:
    return make_inputs(tmp_path)


def test_the_stage_writes_states_only_when_offline(recipe: Recipe) -> None:
    directory = Path(recipe.output) / "capture"
    online = run_capture(recipe)
    assert online["bytes"] == 0
    assert not list(directory.iterdir())
    summary = run_capture(offline(recipe))
    assert summary["bytes"] == sum(path.stat().st_size - SEAL_BYTES for path in directory.glob("shard-*.bin")) > 0
    assert summary["aux_layer_ids"] == [2, 4, 5]


def test_eagle1_needs_the_final_state_only(recipe: Recipe) -> None:
    summary = run_capture(offline(replace(recipe, drafter=DrafterSection(variant="eagle1"))))
    assert summary["bytes_per_token"] == 32 * 4
