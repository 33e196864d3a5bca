"""Whatever is wrong with a directory, reading it either works or raises one line; it never fails in another way."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.checkpoints.contract import describe_drafter
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.reading import is_drafter, read_drafter
from fledge.errors import CheckpointError
from tests.broken_checkpoints import REDUCED
from tests.checkpoint_fixtures import TARGET, make_drafter

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
MORE_FIELDS = (
    "num_aux_layers",
    "rope_scaling",
    "rope_parameters",
    "eagle_config",
    "layer_types",
    "dtype",
    "logit_scale",
)


@pytest.fixture(scope="module", params=["vllm", "speculators"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound") / "drafter"
    save_drafter(make_drafter(REDUCED), directory, to=request.param)
    return directory


@contextmanager
def copy_of(directory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(shutil.copytree(directory, Path(temporary) / "drafter"))


def read_or_refuse(directory: Path) -> None:
    with suppress(CheckpointError):
        if is_drafter(directory):
            json.dumps(describe_drafter(read_drafter(directory), TARGET))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_value_in_any_field(sound: Path, data: st.DataObject) -> None:
    with copy_of(sound) as directory:
        path = directory / "config.json"
        fields = json.loads(path.read_text())
        holder = fields
        if (inner := fields.get("transformer_layer_config")) and data.draw(st.booleans()):
            holder = inner
        holder[data.draw(st.sampled_from([*holder, *MORE_FIELDS]))] = data.draw(JSON_VALUES)
        path.write_text(json.dumps(fields))
        read_or_refuse(directory)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_to_the_weights(sound: Path, data: st.DataObject) -> None:
    with copy_of(sound) as directory:
        path = directory / "model.safetensors"
        content = bytearray(path.read_bytes())
        header = int.from_bytes(content[:8], "little") + 8
        if data.draw(st.booleans()):
            content = content[: data.draw(st.integers(0, len(content) - 1))]
        else:
            for position in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=4)):
                content[position] = data.draw(st.integers(0, 255))
        path.write_bytes(bytes(content))
        read_or_refuse(directory)
