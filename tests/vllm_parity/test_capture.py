"""Real vLLM answers and hands over its states: the same as ours, and good to train on. Run by `make test-vllm`.

One server for all of it, split over two processes (tensor parallel), which reads prompts in chunks and has a prefix
cache. The target has 4 heads, so that it can be split.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target, save_target, weights_digest
from fledge.decoding.params import SamplingParams
from fledge.drift.perturb import Perturbation
from fledge.drift.probe import Prober, ProbeSettings
from fledge.drift.prompts import ProbePrompt
from fledge.drift.sources import VllmServers
from fledge.errors import FledgeError
from fledge.layers.config import ExpertsConfig, LatentConfig, RopeConfig
from fledge.progress import Progress
from fledge.training.capture import FledgeCapture
from fledge.training.data.examples import TokenStore, collate
from fledge.training.data.loader import HiddenStateStore
from fledge.training.drafter_setup import drafter_config
from fledge.training.pipeline import Pipeline
from fledge.training.recipe import Recipe
from fledge.training.stages.vllm import answers_of, captured_layers, open_hosts, storage
from fledge.vllm_states.files import StateFiles
from fledge.vllm_states.hosts import VllmHosts
from tests.command_line import fledge
from tests.tiny_models import TINY_LAYER, TINY_TARGET, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from tests.tiny_training import fork_ranks, weights, write_run
from tests.vllm_parity.test_parity import VLLM_PYTHON

TOLERANCE = 1e-4
OPTIONS = "--tensor-parallel-size 2 --enforce-eager --max-num-seqs 4 --max-num-batched-tokens 32 --block-size 32"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM_PYTHON is None, reason="FLEDGE_VLLM_PYTHON is not set (make test-vllm sets it)"),
    pytest.mark.filterwarnings("ignore::fledge.errors.CheckpointWarning"),
]


def write_recipe(root: Path, options: str = OPTIONS, **target: Any) -> Path:
    """The tiny run of other tests, with a target that vLLM's CPU attention can read, and vLLM for all its work."""
    layer = replace(TINY_LAYER, hidden_size=64, head_dim=32)
    config = replace(TINY_TARGET, layer=layer, vocab_size=VOCAB_SIZE, max_positions=192, eos_ids=(VOCAB_SIZE - 1,))
    config = replace(config, **target)
    engine = {"engine": "vllm"}
    path = write_run(root, capture=engine, regenerate=engine, eval={"enabled": False}, vllm={"options": options})
    save_target(make_target(config), root / "split")
    save_tokenizer(root / "split")
    recipe = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**recipe, "target": {"path": "split"}}))
    return path


@pytest.fixture(scope="module", name="path")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("capture"))


@pytest.fixture(scope="module", name="hosts")
def _hosts(path: Path) -> Iterator[VllmHosts]:
    """A server as `fledge train` starts it. All files below `path` can name its address as one of `vllm.urls`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        (path.parent / "run").mkdir()
        with open_hosts(Recipe.load(path), Progress(quiet=True)) as hosts:
            yield hosts


def elsewhere(hosts: VllmHosts, path: Path, output: str) -> list[str]:
    """Overrides for a run of its own, from the server that runs already."""
    run = path.parent
    return [f"output={run / output}", f"vllm.urls=[{hosts.addresses[0]}]", f"vllm.storage={run / 'run' / 'states'}"]


def check_one_pass(path: Path, hosts: VllmHosts, *overrides: str, tolerance: float = TOLERANCE) -> None:
    """Answers are what our own target chooses, and their states what it computes.

    Prompts are longer than a chunk; the second half of them begins as the first does, and is found in the cache.
    """
    recipe = Recipe.load(path, overrides)
    target = load_target(resolve(recipe.target.path))
    files = StateFiles(storage(recipe), captured_layers(recipe))
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB_SIZE - 1, (size,), generator=random).tolist() for size in (45, 20, 9)]
    prompts += [[*prompts[0][:40], 3, 5], prompts[1]]
    params = SamplingParams(temperature=0.0, max_tokens=12, seed=1)
    outputs = answers_of(recipe, hosts, leave_states=True).generate(prompts, [params] * len(prompts))
    store = path.parent / "answered"
    with TokenStore.writer(store, VOCAB_SIZE) as writer:
        for output in outputs:
            ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            writer.add(ids, [True] * len(ids))
    capture, layers = FledgeCapture(target), files.layers
    for i, prompt in enumerate(prompts):
        ids = TokenStore(store).example(i)[0]
        batch = collate(TokenStore(store), [(i,)], len(ids))
        ours = capture.states(batch, layers.layer_ids)
        assert ours.aux is not None
        chosen = target.logits(ours.final)[0].argmax(-1).tolist()
        assert ids[len(prompt) :].tolist() == chosen[len(prompt) - 1 : -1]
        until = time.monotonic() + 30
        while (states := files.read(ids[:-1])) is None and time.monotonic() < until:  # it is being written
            time.sleep(0.05)
        assert states is not None
        expected = ours.aux[0, :-1].view(len(ids) - 1, len(layers.layer_ids), -1)
        torch.testing.assert_close(states, expected, atol=tolerance, rtol=tolerance)
        with torch.no_grad():
            torch.testing.assert_close(target.norm(states[:, -1]), ours.final[0, :-1], atol=tolerance, rtol=tolerance)
    files.clean([])


def test_answers_and_states_of_one_pass_are_ours(path: Path, hosts: VllmHosts) -> None:
    check_one_pass(path, hosts)


def test_states_of_a_target_with_latent_attention_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One size of latents is all that vLLM's CPU build has, without chunks; its own rotary kernel is wrong for them."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    latent = LatentConfig(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32)
    experts = ExpertsConfig(num_experts=2, num_experts_per_token=1, intermediate_size=64, normalised=False)
    rope = RopeConfig(theta=10000.0, interleaved=True)
    plain = {"mlp_bias": False, "qkv_bias": False, "output_bias": False}
    layer = replace(TINY_LAYER, hidden_size=64, head_dim=64, num_kv_heads=4, latent=latent, rope=rope, **plain)
    dense = (layer,) * TINY_TARGET.num_layers
    options = """--enforce-eager --max-num-seqs 4 --compilation-config '{"custom_ops": ["-rotary_embedding"]}'"""
    path = write_recipe(tmp_path, options, family="deepseek_v2", layer=replace(layer, experts=experts), layers=dense)
    (tmp_path / "run").mkdir()
    aux = "drafter.aux_layer_ids=[1,2,3]"
    with open_hosts(Recipe.load(path, [aux]), Progress(quiet=True)) as hosts:
        check_one_pass(path, hosts, aux, tolerance=10 * TOLERANCE)  # of values up to 30


def test_two_processes_train_with_fsdp2_on_states_that_vllm_writes_meanwhile(path: Path, hosts: VllmHosts) -> None:
    """And a process that reads what was captured before, and one that captures by itself, make the same of them."""
    shared = elsewhere(hosts, path, "online")
    done = fork_ranks(str(path), *shared, "fit.parallel=fsdp2", "vllm.storage_gb=0.0002", cwd=path.parent)
    assert done.returncode == 0, done.stderr
    assert not list((path.parent / "run" / "states").iterdir())
    recipe = Recipe.load(path, [*shared, "capture.mode=offline"])
    report = Pipeline(recipe, progress=Progress(quiet=True)).run(until="capture")
    store = TokenStore(report.states["regenerate"].directory / "examples")
    layers = captured_layers(recipe)
    identity = {"target": weights_digest(resolve(recipe.target.path)), "aux_layer_ids": layers.aux_layer_ids}
    states = HiddenStateStore(report.states["capture"].directory, store, **identity)  # type: ignore[arg-type]
    target = FledgeCapture(load_target(resolve(recipe.target.path)))
    for i in range(len(store)):
        size = int(store.lengths[i])
        found, expected = states.read([(i,)], size), target.states(collate(store, [(i,)], size), layers.aux_layer_ids)
        for a, b in ((found.final, expected.final), (found.aux, expected.aux)):
            torch.testing.assert_close(a[:, :-1], b[:, :-1], atol=TOLERANCE, rtol=TOLERANCE)  # type: ignore[index]
    own = fledge("train", str(path), *shared, "capture.engine=fledge", "--until", "fit", "--json", cwd=path.parent)
    assert own.returncode == 0, own.stderr
    candidate = Path(json.loads(own.stdout)["stages"]["fit"]["directory"]) / "candidates" / "step-000012"
    expected_weights, found_weights = weights(candidate), weights(path.parent / "online" / "drafter")
    for name, value in expected_weights.items():
        torch.testing.assert_close(found_weights[name], value, rtol=0, atol=1e-3)


def test_drift_of_a_target_that_only_vllm_has_loaded(path: Path, hosts: VllmHosts) -> None:
    """The same server, and what the probe finds with a target of its own."""
    recipe = Recipe.load(path)
    directory = resolve(recipe.target.path)
    target = load_target(directory)
    drafter = path.parent / "probed"
    save_drafter(make_drafter(drafter_config(recipe.drafter, target.config), target, seed=2), drafter)
    vllm = VllmServers(drafters=(str(drafter),), storage=storage(recipe), urls=tuple(hosts.addresses))
    assert vllm.layers(str(directory)).key == captured_layers(recipe).key
    random = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, VOCAB_SIZE - 1, (size,), generator=random).tolist() for size in (40, 9)]
    prompts = [ProbePrompt(id=str(i), category="", token_ids=tuple(one)) for i, one in enumerate(ids)]
    found = []
    for servers in (None, vllm):
        settings = ProbeSettings(depth=3, max_tokens=12)
        prober = Prober(str(directory), "ids", settings, {"device": "cpu", "max_model_len": 128}, servers)
        prober.load(str(drafter))
        answered = prober.answered(prompts, Perturbation())
        found.append(prober.probe(answered, Perturbation(), lambda *_, **__: None))
        prober.close()
    ours, theirs = found
    assert ours.output_tokens == theirs.output_tokens == 24
    assert ours.acceptance.rounds == theirs.acceptance.rounds > 0
    for a, b in zip(ours.by_depth, theirs.by_depth, strict=True):
        assert (a.rounds, a.reached, a.missed) == (b.rounds, b.reached, b.missed)
        assert b.attention.mass == pytest.approx(a.attention.mass, abs=1e-4)
        assert b.feature_cosine == pytest.approx(a.feature_cosine, abs=1e-4)


def test_a_killed_vllm_is_one_line_that_says_how_to_go_on(path: Path, hosts: VllmHosts) -> None:
    """The last test: nobody can use the server after it. What it had written stays, and is found."""
    files = StateFiles(storage(Recipe.load(path)), captured_layers(Recipe.load(path)))
    hosts.write_states(files.layers.key, [1, 2, 3])
    until = time.monotonic() + 30
    while not files.path([1, 2, 3]).exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert hosts._process is not None
    guard = hosts._process._child.pid
    for child in Path(f"/proc/{guard}/task/{guard}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    with pytest.raises(FledgeError, match=r"SIGKILL.*; the same command goes on from here"):
        hosts.write_states(files.layers.key, [1, 2, 3, 4])
    assert files.read([1, 2, 3]) is not None
