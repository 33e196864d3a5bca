"""vLLM behind the engine's protocol, with a stand-in for vLLM: `LLM(..., engine="vllm")` and what it is built on."""

import json
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fledge import LLM, SamplingParams
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import load_target
from fledge.engine.protocol import DeadEngineError
from fledge.engine.vllm_engine import VllmEngine
from fledge.engine.vllm_pair import check_exchange
from fledge.errors import CheckpointError, ConfigError, SwapRefusedError
from fledge.evaluation.evaluate import EvalSettings, run_eval
from fledge.evaluation.report import EvalReport
from fledge.evaluation.workloads import Prompt, Workload
from fledge.models.drafter.variants import EAGLE_3_1
from fledge.progress import Progress
from tests.checkpoint_fixtures import edit_config
from tests.command_line import fledge
from tests.fake_vllm import install
from tests.serving import pair_directory
from tests.tiny_models import make_drafter

pytestmark = pytest.mark.vllm  # with a stand-in, beside those with the real one

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def speculation() -> dict[str, object]:
    return {"model": str(pair_directory() / "drafter"), "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch, tmp_path_factory.mktemp("vllm"), token_seconds=0.01)
        target = pair_directory() / "target"
        made = LLM(target, engine="vllm", speculative_config=speculation(), tensor_parallel_size=2, max_num_seqs=4)
        yield made
        made.close()


def tokens_of(prompt: list[int], count: int = 10) -> tuple[int, ...]:
    """What the stand-in answers."""
    return tuple((sum(prompt) + i) % 40 + 3 for i in range(count))


def test_token_ids_in_and_out_with_how_rounds_went(llm: LLM) -> None:
    prompts = [[1, 2, 3], [4, 5], [6], [7], [8], [9]]  # more than run at once
    outputs = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [tokens_of(prompt) for prompt in prompts]
    first = outputs[0]
    assert first.outputs[0].finish_reason == "length"
    assert [tuple(one) for one in first.outputs[0].rounds] == [(4, 3, 3), (8, 3, 0), (9, 3, 3)]
    assert (first.metrics.acceptance.acceptance_length, first.metrics.prompt_tokens) == (3.0, 3)
    assert first.metrics.time_to_first_token is not None
    assert not llm.engine.has_unfinished
    assert llm.engine.stats().acceptance.rounds == 3 * len(prompts)


def test_vllm_is_started_with_the_options_as_they_are(llm: LLM) -> None:
    engine = llm.engine
    assert isinstance(engine, VllmEngine)
    words = engine.process.client.get_json("/argv")["argv"]
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert words[words.index("--per-request-spec-decode-metrics") + 1] == "detailed"
    given = json.loads(words[words.index("--speculative-config") + 1])
    assert given == {**speculation(), "method": "eagle3"}  # which vLLM guesses by the directory's name
    assert (engine.info.max_model_len, engine.info.max_depth, engine.info.device) == (512, 3, "vLLM 0.32.0")


def test_answers_end_where_ours_do(llm: LLM) -> None:
    (cut,) = llm.generate([[1] * 508], GREEDY)  # of 512
    assert (len(cut.outputs[0].token_ids), cut.outputs[0].finish_reason) == (4, "length")
    stop = tokens_of([1])[4]
    (by_id,) = llm.generate([[1]], SamplingParams(temperature=0.0, max_tokens=10, stop_token_ids=[stop]))
    assert by_id.outputs[0].token_ids == tokens_of([1])[:5]
    assert (by_id.outputs[0].finish_reason, by_id.outputs[0].stop_reason) == ("stop", stop)
    (whole,) = llm.generate([[1]], GREEDY)
    word = whole.outputs[0].text[3]
    (by_text,) = llm.generate([[1]], SamplingParams(temperature=0.0, max_tokens=400, stop=[word]))
    assert (by_text.outputs[0].finish_reason, by_text.outputs[0].stop_reason) == ("stop", word)
    assert by_text.outputs[0].text == whole.outputs[0].text[:3]
    events = list(llm.stream([1], GREEDY))
    assert len(events) > 2
    assert sum((event.token_ids for event in events), ()) == tokens_of([1])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs: vLLM is not asked for those from here"),
        ({"allowed_token_ids": [1]}, "constraint: vLLM cannot be asked for that from here"),
    ],
)
def test_what_only_our_engine_does_is_refused(llm: LLM, params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.generate([[1]], SamplingParams(**params))  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished


def test_an_id_that_is_in_use_is_refused(llm: LLM) -> None:
    llm.engine.add_request("twice", [1], GREEDY)
    with pytest.raises(ConfigError, match="request id 'twice' is in use"):
        llm.engine.add_request("twice", [2], GREEDY)
    last = llm.engine.abort("twice")
    assert last is not None
    assert last.finish_reason == "abort"
    assert not llm.engine.has_unfinished


def test_a_drafter_is_held_to_its_contract_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, fail="vLLM was started")
    drafter = tmp_path / "drafter"
    shutil.copytree(pair_directory() / "drafter", drafter)
    edit_config(drafter, vocab_size=1000)
    target = pair_directory() / "target"
    with pytest.raises(CheckpointError, match="vocab"):
        LLM(target, engine="vllm", speculative_config={"model": str(drafter), "num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match="'tree_width' is for Fledge's own engine"):
        LLM(target, engine="vllm", speculative_config={**speculation(), "tree_width": 2})
    done = fledge("serve", str(target), "--engine", "vllm", "--spec-model", str(drafter), "--port", "0", cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1].startswith(f"error: {drafter}")) == (2, True)
    done = fledge("serve", str(target), "--engine", "vllm", "--brand-new", "1", "--port", "0", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == (
        "error: vLLM did not start: it ended with status 1: vLLM was started"  # the stand-in's last words
    )


def test_a_drafter_of_another_build_cannot_take_the_place_of_one_that_vllm_has(tmp_path: Path) -> None:
    target, own = pair_directory() / "target", pair_directory() / "drafter"
    served = {"model": str(own), "method": "eagle3", "num_speculative_tokens": 3}
    config = load_target(target).config
    save_drafter(make_drafter(EAGLE_3_1.config_for(config), load_target(target), seed=7), tmp_path / "alike")
    assert check_exchange(target, served, str(tmp_path / "alike")) == tmp_path / "alike"
    two_layers = replace(EAGLE_3_1.config_for(config), num_layers=2)
    save_drafter(make_drafter(two_layers, load_target(target)), tmp_path / "deeper")
    with pytest.raises(SwapRefusedError, match=r"deeper: its config differ.*; start the server with it instead"):
        check_exchange(target, served, str(tmp_path / "deeper"))
    edit_config(tmp_path / "alike", vocab_size=1000)
    with pytest.raises(CheckpointError, match="vocab"):
        check_exchange(target, served, str(tmp_path / "alike"))
    with pytest.raises(SwapRefusedError, match="EAGLE drafters only"):
        check_exchange(target, {"method": "ngram"}, str(own))


def test_a_taken_port_and_a_wrong_version_are_one_line_and_vllm_is_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, version="0.9.1", fail="vLLM was started")
    words = ("serve", str(pair_directory() / "target"), "--engine", "vllm", "--port")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = fledge(*words, str(other.getsockname()[1]), cwd=tmp_path)
    old = fledge(*words, "0", cwd=tmp_path)
    assert (taken.returncode, old.returncode) == (2, 2)
    (said,) = taken.stderr.splitlines()
    assert "Address already in use; see --host and --port" in said
    said = old.stderr.splitlines()[-1]
    assert re.fullmatch(r"error: vLLM 0\.9\.1 in .* is too old; known to work: 0\.32\.x, 0\.26\.x", said)


def test_auto_is_ours_where_it_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path)
    target = pair_directory() / "target"
    assert not isinstance(LLM(target, engine="auto").engine, VllmEngine)
    llm = LLM(target, engine="auto", tensor_parallel_size=2, scheduling_policy="priority")
    assert isinstance(llm.engine, VllmEngine)
    assert llm.engine.info.scheduling_policy == "priority"
    llm.close()
    with pytest.raises(ConfigError, match="allowed is fledge or vllm or auto"):
        LLM(target, engine="sglang")


def test_a_death_is_told_once_and_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, die_after=2)
    llm = LLM(pair_directory() / "target", engine="vllm")
    with pytest.raises(DeadEngineError, match=r"vLLM has stopped: it was killed by SIGKILL .*CUDA out of memory"):
        llm.generate([[1, 2]], GREEDY)
    llm.close()


def test_generate_passes_vllms_options_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path)
    words = ("--target", str(pair_directory() / "target"), "--max-tokens", "5", "--json", "--engine", "vllm")
    (tmp_path / "prompts").write_text('{"prompt_token_ids": [97]}')
    done = fledge(
        "generate", "--prompts", "prompts", *words, "--tensor-parallel-size", "2", "--enforce-eager", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"][0]["token_ids"] == list(tokens_of([97], 5))
    refused = fledge("generate", "a", "--target", "x", "--tensor-parallel-size", "2", cwd=tmp_path)
    assert refused.stderr == (
        "error: --tensor-parallel-size: is an option of vLLM's: "
        "fledge generate a --target x --tensor-parallel-size 2 --engine vllm\n"
    )


@pytest.mark.parametrize("version", ["0.32.0", "0.26.0"])
def test_eval_has_acceptance_by_depth_from_requests_or_else_from_its_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """The stand-in accepts all drafts of a round, then none of the next. An old vLLM tells only sums."""
    install(monkeypatch, tmp_path, version)
    messages = ({"role": "user", "content": "Why?"},)
    prompts = [Prompt(id=name, category=name, messages=messages) for name in "ab"]
    workload = Workload(name="ids", prompts=tuple(prompts), source="", licence="")
    pair = pair_directory()
    settings = EvalSettings(
        target=str(pair / "target"),
        drafters=(str(pair / "drafter"),),
        depths=(3,),
        temperatures=(0.0,),
        max_tokens=13,
        engine="vllm",
        vllm_options=("--tensor-parallel-size", "2"),
    )
    results = run_eval(settings, [workload], Progress(quiet=True))
    assert results.status == "complete"
    (row,) = EvalReport(results).rows
    assert row.rounds == 2 * len(prompts) * 2 + len(prompts)
    assert row.rate_by_depth == pytest.approx((0.6, 0.6, 0.6))
    assert row.by_workload["ids"].value == pytest.approx(2.8)
    assert set(row.by_category) == (set("ab") if version == "0.32.0" else set())
    assert any("counts acceptance of all requests together" in note for note in results.notes) == (version == "0.26.0")
