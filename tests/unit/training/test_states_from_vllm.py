"""States that a vLLM writes and training reads: the same as ours, bounded, and whole whatever happens to either."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fledge.checkpoints.target import load_target
from fledge.errors import ConfigError, FledgeError
from fledge.training.capture import FledgeCapture
from fledge.training.data.examples import TokenStore
from fledge.training.data.loader import HiddenStateStore
from fledge.training.data.stream import StateStream
from fledge.training.recipe import CaptureSection, Recipe, VllmSection
from fledge.training.stages import regenerate as stages_regenerate
from fledge.training.stages import vllm
from fledge.training.stages.vllm import answers_of, captured_layers, storage
from fledge.vllm_process.client import VllmError
from fledge.vllm_states import files as streams
from fledge.vllm_states import hosts as servers
from fledge.vllm_states.files import StateFiles, StateReader
from fledge.vllm_states.hosts import VllmHosts
from tests.fake_states import FakeVllm, HiddenStateSpec, in_place_of_vllm, stubs
from tests.fit_cases import TARGET, context, final_weights, make_inputs, offline, run_capture, run_fit
from tests.tiny_models import TARGET_CONFIGS
from tests.unit.test_files import full_disk

pytestmark = pytest.mark.vllm  # with a stand-in, beside those with the real one

KEY = "0123456789abcdef"


@pytest.fixture(name="recipe")
def _recipe(tmp_path: Path) -> Recipe:
    return replace(make_inputs(tmp_path), capture=CaptureSection(engine="vllm"))


@pytest.fixture(name="fake")
def _fake(recipe: Recipe) -> FakeVllm:
    target = load_target(Path(recipe.target.path))
    return FakeVllm(FledgeCapture(target), captured_layers(recipe), storage(recipe))


@pytest.fixture(name="store")
def _store(recipe: Recipe) -> TokenStore:
    return TokenStore(Path(recipe.output) / "regenerate" / "examples")


def stream_of(fake: FakeVllm, store: TokenStore, max_bytes: int = 1 << 30) -> StateStream:
    files, key, norm = StateFiles(fake.storage, fake.layers), fake.layers.key, fake.capture.model.norm
    ask = lambda ids: fake.write_states(key, ids)  # noqa: E731
    return StateStream(StateReader(files, ask, norm=norm), store, max_bytes=max_bytes, in_flight=4)


def limited(recipe: Recipe, **vllm_values: Any) -> Recipe:
    return replace(recipe, vllm=VllmSection(**vllm_values))


def test_training_on_its_states_is_training_on_ours_and_nothing_is_left_over(recipe: Recipe, fake: FakeVllm) -> None:
    """Online, with room for a few files only. A state that is asked for twice is one that a second epoch reads."""
    ahead = 6 * fake.layers.file_bytes(40)  # of 40 examples of 6 to 40 tokens; as much again is for answers
    with in_place_of_vllm(fake):
        run_fit(limited(recipe, storage_gb=2 * ahead / 1e9), "from-vllm")
    run_fit(replace(recipe, capture=CaptureSection()), "ours")
    ours, theirs = (final_weights(Path(recipe.output) / name) for name in ("ours", "from-vllm"))
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, atol=1e-4, rtol=1e-4)
    assert not list(fake.storage.iterdir())
    assert fake.most_files >= 2
    assert fake.most_bytes <= ahead
    assert max(fake.asked.values()) <= 2


def test_offline_they_become_the_shards_that_we_write(recipe: Recipe, fake: FakeVllm, store: TokenStore) -> None:
    """All but the last token of an example, which nobody reads."""
    ours = offline(replace(recipe, capture=CaptureSection()))
    theirs = replace(ours, capture=replace(ours.capture, engine="vllm"))
    found = []
    for one in (ours, theirs):
        with in_place_of_vllm(fake):
            run_capture(one)
        directory, target = Path(recipe.output) / "capture", fake.layers.target
        states = HiddenStateStore(directory, store, target=target, aux_layer_ids=fake.layers.aux_layer_ids)
        assert states.ends("cpu").head_weight.equal(fake.capture.ends.head_weight)
        found.append([states._states_of(i).clone() for i in range(len(store))])
        for path in directory.iterdir():
            path.unlink()
    assert fake.asked
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a[:-1], b[:-1], atol=1e-4, rtol=1e-4)
        assert not b[-1].any()


@pytest.mark.parametrize("damage", ["cut", "flip", "stale"])
def test_what_is_not_whole_or_of_other_tokens_is_made_again(fake: FakeVllm, store: TokenStore, damage: str) -> None:
    good = list(stream_of(fake, store).of([3, 4]))
    fake.asked.clear()
    fake.damage = [damage]
    again = list(stream_of(fake, store).of([3, 4]))
    assert all(a.equal(b) for a, b in zip(good, again, strict=True))
    assert sum(fake.asked.values()) == 3
    fake.damage = ["cut"] * 9
    with pytest.raises(FledgeError, match="not whole after 3 attempts; is the storage that vLLM writes to sound"):
        list(stream_of(fake, store).of([3]))


def test_a_killed_trainer_finds_what_was_made_ahead(fake: FakeVllm, store: TokenStore) -> None:
    expected = list(stream_of(fake, store).of(range(8)))
    fake.asked.clear()
    killed = stream_of(fake, store).of(range(8))
    first = next(killed)
    while len(list(fake.storage.glob("*.states"))) < 7:
        time.sleep(0.001)
    killed.close()
    rest = list(stream_of(fake, store).of(range(1, 8)))
    assert all(a.equal(b) for a, b in zip(expected, [first, *rest], strict=True))
    assert sum(fake.asked.values()) == 8  # nothing was computed twice
    assert not list(fake.storage.iterdir())


def test_a_reader_that_is_behind_holds_vllm_up(fake: FakeVllm, store: TokenStore) -> None:
    sizes = [fake.layers.file_bytes(int(n) - 1) for n in store.lengths]
    reading = stream_of(fake, store, max_bytes=sum(sizes[:3])).of(range(20))
    for taken in range(1, 4):
        next(reading)
        until = time.monotonic() + 0.05  # for its threads to run ahead in
        while time.monotonic() < until:
            unread = sum(map(fake.layers.file_bytes, map(len, list(fake.asked)))) - sum(sizes[:taken])
            assert unread <= sum(sizes[:3])
    reading.close()


def test_a_full_disk_is_one_line_and_leaves_nothing(
    fake: FakeVllm, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_RETRY_SECONDS", 0.0)
    with full_disk(2000), pytest.raises(FledgeError, match=r"vLLM could not write it: File too large; lower vllm"):
        list(stream_of(fake, store).of([0]))
    assert not list(fake.storage.iterdir())
    monkeypatch.setattr(streams, "ARRIVAL_SECONDS", 0.0)
    fake.damage = ["lose"] * 3
    with pytest.raises(FledgeError, match=r"no file came within .* is vllm\.storage the same directory"):
        list(stream_of(fake, store).of([0]))


def test_states_of_another_server_are_refused(recipe: Recipe, fake: FakeVllm) -> None:
    fake.layers = replace(fake.layers, aux_layer_ids=(1,))
    files = StateFiles(fake.storage, captured_layers(recipe))
    fake.write_states(files.layers.key, [1, 2, 3])
    with pytest.raises(
        FledgeError, match=r"states are \[3, 2, 32\] float32, expected \[3, 4, 32\] float32; start vLLM"
    ):
        files.read([1, 2, 3])
    fake.layers = files.layers
    with torch.no_grad():
        fake.capture.model.norm.weight.mul_(2)  # serves other weights than are in target.path
    with in_place_of_vllm(fake), pytest.raises(FledgeError, match=r"does not serve the target as it is here"):
        run_fit(recipe)


def test_files_that_nobody_will_read_are_removed(fake: FakeVllm) -> None:
    files = StateFiles(fake.storage, fake.layers)
    for ids in ([1, 2, 3], [4, 5]):
        fake.write_states(fake.layers.key, ids)
    others = fake.storage / "ffffffffffffffff-1.states"
    others.touch()
    assert files.clean([[4, 5]]) == files.path([4, 5]).stat().st_size == files.bytes_there()
    assert set(fake.storage.iterdir()) == {files.path([4, 5]), others}


def worker(directory: Path, rank: int = 0) -> tuple[Any, torch.Tensor]:
    """A connector on both sides, with a cache of 10 blocks of 4 tokens, 3 layers, 2 numbers."""
    with stubs(rank) as module:
        return _worker(module, directory)


def _worker(module: Any, directory: Path) -> tuple[Any, torch.Tensor]:
    ids = SimpleNamespace(eagle_aux_hidden_state_layer_ids=[1, 2, 8])
    speculation = SimpleNamespace(method="extract_hidden_states", draft_model_config=SimpleNamespace(hf_config=ids))
    transfer = SimpleNamespace(kv_connector_extra_config={"shared_storage_path": str(directory)})
    model = SimpleNamespace(use_mla=False)
    config = SimpleNamespace(speculative_config=speculation, kv_transfer_config=transfer, model_config=model)
    groups = [SimpleNamespace(kv_cache_spec=object()), SimpleNamespace(kv_cache_spec=HiddenStateSpec())]
    connector = module.FledgeConnector(config, None, SimpleNamespace(kv_cache_groups=groups))
    cache = torch.randn(10, 3, 4, 2)
    connector.register_kv_caches({"states": cache})
    return connector, cache


def finished(tokens: list[int], status: str = "FINISHED_STOPPED", **params: Any) -> Any:
    kind = SimpleNamespace(name=status)
    prompt = tokens[:4]
    return SimpleNamespace(
        request_id="r", status=kind, kv_transfer_params=params, all_token_ids=tokens, prompt_token_ids=prompt
    )


def test_the_connector_writes_what_is_in_the_blocks(tmp_path: Path, fake: FakeVllm) -> None:
    tokens = list(range(7))
    layers = replace(fake.layers, aux_layer_ids=(1, 2), hidden_size=2)
    files = StateFiles(tmp_path, layers)
    for rank in (1, 0):  # of two, the first writes
        connector, cache = worker(tmp_path, rank)
        asked = {"fledge_states": layers.key, "include_output_tokens": True}
        held, told = connector.request_finished_all_groups(finished(tokens, **asked), ([0], [5, 2]))
        assert (held, told) == (True, {"states_file": files.path(tokens[:-1]).name})
        connector.bind_connector_metadata(connector.build_connector_meta(None))
        done, _ = connector.get_finished({"r"})
        connector.bind_connector_metadata(connector.build_connector_meta(None))
        connector.shutdown()
        done = done or connector.get_finished(set())[0]
        assert (done == {"r"}) == files.path(tokens[:-1]).exists() == (rank == 0)
    expected = torch.cat([cache[5].transpose(0, 1), cache[2].transpose(0, 1)[:2]])
    found = files.read(tokens[:-1])
    assert found is not None
    assert found.equal(expected)


def test_the_connector_leaves_other_requests_alone(tmp_path: Path) -> None:
    connector, _ = worker(tmp_path)
    for request in (
        finished([1, 2, 3]),
        finished([1, 2, 3], fledge_states="../../etc/passwd"),
        finished([1, 2, 3], "FINISHED_ABORTED", fledge_states=KEY),
    ):
        assert connector.request_finished_all_groups(request, ([], [1])) == (False, None)
    assert connector.build_connector_meta(None).saves == []
    connector.shutdown()


class Client:
    """A server that answers with its own name; or is gone, or refuses."""

    def __init__(self, address: str, status: int | None = 200) -> None:
        self.address, self.status, self.posted = address, status, 0

    def get(self, _path: str) -> bytes:
        return b'{"data": [{"id": "m", "max_model_len": 64}]}'

    def post(self, _path: str, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        self.posted += 1
        if self.status != 200:
            raise VllmError("gone" if self.status is None else "too long", self.status)
        choice = {"token_ids": [7, 1], "text": "x", "finish_reason": "stop"}
        return {"id": self.address, "choices": [choice], "asked": body}


@pytest.fixture(name="brief")
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(servers, "_PAUSE_SECONDS", 0.02)


@pytest.mark.usefixtures("brief")
def test_a_server_that_is_gone_is_left_out_and_when_all_are_gone_it_is_one_line() -> None:
    gone, well = Client("http://a", None), Client("http://b")
    hosts = VllmHosts([gone, well])  # type: ignore[list-item]
    assert {hosts.complete({})["id"] for _ in range(4)} == {"http://b"}
    assert gone.posted < 4
    well.status = None
    with pytest.raises(FledgeError, match=r"http://.: gone; the same command goes on from here"):
        hosts.complete({})
    well.status = 400
    with pytest.raises(FledgeError, match=r"http://b: too long; see vllm\.options"):
        hosts.complete({})
    well.status = 200
    with pytest.raises(FledgeError, match="vLLM runs without Fledge's connector; start it as"):
        hosts.write_states(KEY, [1])


def test_answers_leave_their_states_while_there_is_room(recipe: Recipe, fake: FakeVllm) -> None:
    from fledge.decoding.params import SamplingParams

    client = Client("http://a")
    posted: list[dict[str, Any]] = []
    client.post = lambda path, body, **kw: posted.append(body) or Client.post(client, path, body, **kw)  # type: ignore
    room = 2 * fake.layers.file_bytes(3 + 20) + 2 * fake.layers.file_bytes(3)
    few = limited(recipe, storage_gb=room / 1e9, concurrency=1)
    answers = answers_of(few, VllmHosts([client]), leave_states=True)  # type: ignore[list-item]
    outputs = answers.generate([[1, 2, 3]] * 9, [SamplingParams(max_tokens=20, seed=5)] * 9)
    assert [output.outputs[0].token_ids for output in outputs] == [(7, 1)] * 9
    with_states = [body["kv_transfer_params"] for body in posted if "kv_transfer_params" in body]
    assert with_states[0] == {"fledge_states": fake.layers.key, "include_output_tokens": True}
    assert 1 <= len(with_states) < 9
    assert all(body["seed"] == 5 and body["stop_token_ids"] == [1] for body in posted)


def test_a_layer_that_vllm_dies_of_is_refused_in_one_line(tmp_path: Path) -> None:
    recipe = make_inputs(tmp_path, target=replace(TARGET_CONFIGS["deepseek-v2"], vocab_size=TARGET.vocab_size))
    recipe = replace(recipe, capture=CaptureSection(engine="vllm"))
    assert '"eagle_aux_hidden_state_layer_ids": [2, ' in vllm.server_command(recipe)
    first = replace(recipe, drafter=replace(recipe.drafter, aux_layer_ids=(0, 1, 2)))
    with pytest.raises(
        ConfigError, match=r"aux layers \[0, 1, 2\]: .*latent attention \(MLA\); choose layers from 1 on$"
    ):
        vllm.server_command(first)


def test_no_vllm_is_said_before_anything_runs(recipe: Recipe) -> None:
    regenerate = context(limited(recipe, python="/nowhere/python"), "regenerate")
    with pytest.raises(ConfigError, match=r"/nowhere/python.*vllm\.urls of servers elsewhere$"):
        stages_regenerate.STAGE.run(regenerate)


def test_the_command_has_all_that_a_server_elsewhere_needs(recipe: Recipe) -> None:
    command = vllm.server_command(limited(recipe, options="--tensor-parallel-size 4 -pp=2", storage="/mnt/states"))
    for part in ("PYTHONPATH=", '"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]', "/mnt/states", "-pp=2"):
        assert part in command
    assert vllm.devices_of_a_server(limited(recipe, options="--tensor-parallel-size 4 -pp=2")) == 8
    with pytest.raises(ConfigError, match=r"-tp: found x"):
        vllm.devices_of_a_server(limited(recipe, options="-tp x"))
