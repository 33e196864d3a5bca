"""What a user of vLLM's Python API expects beside `LLM.generate`: an event loop, streams, structured outputs, help."""

import asyncio
import inspect
import json
import pydoc
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fledge
from fledge import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from fledge.checkpoints.target import save_target
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.engine.outputs import RequestOutput
from fledge.errors import CheckpointError, ConfigError, PromptError
from fledge.native.decoder import NativeTarget
from fledge.native.library import library
from tests.tiny_models import TINY_TARGET, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=24)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model") / "target"
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,))
    save_target(make_target(config), directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(name="llm", scope="module")
def _llm(model: Path) -> LLM:
    return LLM(model)


async def answer(
    engine: AsyncLLM, prompt: str, params: SamplingParams | None = None, request_id: str | None = None
) -> RequestOutput:
    texts, output = [""], None
    async for output in engine.generate(prompt, params, request_id):
        assert output.outputs[0].text.startswith(texts[-1]), "outputs are cumulative"
        texts.append(output.outputs[0].text)
    assert output is not None
    assert output.finished
    return output


def test_async_answers_are_those_of_the_offline_api(model: Path, llm: LLM) -> None:
    expected = {prompt: llm.generate(prompt, GREEDY)[0].outputs[0] for prompt in ("Hello", "more", "and more")}
    engine = AsyncLLM(model, max_num_seqs=2)

    async def ask() -> list[RequestOutput]:
        assert (await engine.get_tokenizer()).eos_token_id == VOCAB_SIZE - 1
        return await asyncio.gather(*(answer(engine, prompt, GREEDY, f"my {prompt}") for prompt in expected))

    outputs = asyncio.run(ask())
    assert [output.request_id for output in outputs] == ["my Hello", "my more", "my and more"]
    assert [(o.outputs[0].text, o.outputs[0].token_ids) for o in outputs] == [
        (one.text, one.token_ids) for one in expected.values()
    ]
    assert all(output.metrics.output_tokens == 24 for output in outputs)
    engine.shutdown()


def test_async_requests_can_be_aborted_left_and_refused(model: Path) -> None:
    engine = AsyncLLM(LLM(model))

    async def ask() -> None:
        reader = asyncio.create_task(answer(engine, "Hello", ENDLESS, "long"))
        await asyncio.sleep(0.02)
        with pytest.raises(ConfigError, match="'long' is in use"):
            await answer(engine, "Hello", GREEDY, "long")
        await engine.abort("long")
        assert (await reader).outputs[0].finish_reason in ("abort", "length")
        async for output in engine.generate("Hello", ENDLESS, "left"):
            assert not output.finished
            break
        cancelled = asyncio.create_task(answer(engine, "Hello", ENDLESS))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(PromptError, match="empty"):
            await answer(engine, "", GREEDY)
        with pytest.raises(ConfigError, match="structured_outputs"):
            await answer(engine, "a", replace(GREEDY, structured_outputs={"regex": "("}))
        assert (await answer(engine, "Hello", GREEDY, "long")).finished  # the id is free again

    asyncio.run(ask())
    engine.shutdown()
    assert not engine._llm.engine.has_unfinished
    with pytest.raises(ConfigError, match="shut down"):
        asyncio.run(answer(engine, "Hello", GREEDY))


def test_a_request_that_comes_while_it_shuts_down_is_refused(llm: LLM) -> None:
    engine, gate = AsyncLLM(llm), threading.Event()

    def long_step() -> None:
        assert gate.wait(30)

    engine._commands.put(long_step)
    closing = threading.Thread(target=engine.shutdown)
    closing.start()
    while not engine._is_closed:
        time.sleep(0.001)
    with pytest.raises(ConfigError, match="shut down"):
        asyncio.run(asyncio.wait_for(answer(engine, "Hello", GREEDY), 5))
    gate.set()
    closing.join()


def test_chat_streams(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    events = list(llm.chat(messages, GREEDY, stream=True))
    assert len(events) > 1
    text = "".join(piece.text for event in events for piece in event.pieces)
    assert text == llm.chat(messages, GREEDY)[0].outputs[0].text
    with pytest.raises(ConfigError, match="only one conversation"):
        llm.chat([messages, messages], GREEDY, stream=True)  # type: ignore[call-overload]


def test_use_tqdm_says_how_far_it_is(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY, use_tqdm=True)
    llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=True)
    assert "2 of 2" in (said := capsys.readouterr().err)
    assert "1 of 1" in said


def test_the_tokenizer_can_be_had(llm: LLM) -> None:
    assert llm.get_tokenizer().decode([VOCAB_SIZE - 1]) == "<|end|>"


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": StructuredOutputsParams(json=json.dumps(SCHEMA))},
        {"guided_decoding": SimpleNamespace(json=SCHEMA, regex=None, backend="xgrammar")},  # as vLLM's own class
    ],
)
def test_structured_outputs(llm: LLM, asked: dict[str, object]) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=200, n=2, **asked)  # type: ignore[arg-type]
    outputs = llm.generate(["a", "b"], params)
    assert all(json.loads(one.text)["a"] in (1, 2) for output in outputs for one in output.outputs)
    (*_, last) = llm.stream("a", replace(params, n=1))
    assert last.output is not None
    assert json.loads(last.output.outputs[0].text)["a"] in (1, 2)


@pytest.mark.parametrize("asked", [{}, {"json": {}, "regex": "a"}, {"jsn": {}}, 3])
def test_structured_outputs_are_one_thing(asked: object) -> None:
    with pytest.raises(ConfigError, match="one of json, regex, choice, grammar, json_object"):
        SamplingParams(structured_outputs=asked)  # type: ignore[arg-type]


def test_llguidance_is_only_needed_for_structured_outputs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "fledge.server.structured", raising=False)
    assert llm.generate("a", GREEDY)
    with pytest.raises(ConfigError, match=r"needs llguidance; pip install 'fledge\[server\]'"):
        llm.generate("a", replace(GREEDY, structured_outputs={"regex": "a+"}))


def test_vllms_options_are_answered_as_on_the_command_line(model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=2: several GPUs or machines .* LLM\(\.\.\., engine='vllm'\)"
    ):
        LLM(model, tensor_parallel_size=2)
    with pytest.warns(UserWarning, match="trust_remote_code: code from model directories is never run here"):
        LLM(model, tensor_parallel_size=1, trust_remote_code=True, enable_lora=False, quantization=None)


def test_help_and_dir_tell_of_everything() -> None:
    told = pydoc.render_doc(LLM, renderer=pydoc.plaintext)
    for name in ("model", *(one.name for one in fields(EngineConfig))):
        assert f" {name}: " in told.split("Parameters, by vLLM's names:")[1]
    assert all(one.name in told for one in fields(SpeculativeConfig))
    params = inspect.getdoc(SamplingParams) or ""
    assert all(name in params for name in inspect.signature(SamplingParams).parameters)
    assert set(dir(fledge)) >= {"LLM", "AsyncLLM", "SamplingParams", "StructuredOutputsParams", "__version__"}
    assert "TYPE_CHECKING" not in dir(fledge)
    fresh = "import sys, fledge; dir(fledge); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", fresh], check=True)


def test_sixteen_bits_on_a_cpu_are_rounded_weights_in_float32(model: Path, recwarn: pytest.WarningsRecorder) -> None:
    stored, rounded = LLM(model, device="cpu"), LLM(model, dtype="bfloat16", device="cpu")
    assert not [one for one in recwarn if "dtype" in str(one.message)]
    assert rounded.engine.info.dtype == "float32"
    for (name, weight), (_, exact) in zip(
        rounded.target.named_parameters(), stored.target.named_parameters(), strict=True
    ):
        assert torch.equal(weight, exact.bfloat16().float()), name
    assert not torch.equal(rounded.target.lm_head.weight, stored.target.lm_head.weight)
    if library() is not None:
        assert isinstance(rounded.engine.runner.state.target, NativeTarget)


def test_sixteen_bits_on_a_cpu_without_packed_weights_draw_a_warning(model: Path) -> None:
    with pytest.warns(UserWarning, match="dtype bfloat16 on a CPU .* slower"):
        assert LLM(model, dtype="bfloat16", device="cpu", pack_weights=False).engine.info.dtype == "bfloat16"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_is_not_finite_is_refused(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    target = make_target(TINY_TARGET).to(dtype)
    target.lm_head.weight.data[3, 5] = value
    save_target(target, tmp_path / "target")
    with pytest.raises(
        CheckpointError, match=r"'lm_head.weight' has 1 values that are not finite, the first at \[3, 5\]"
    ):
        LLM(tmp_path / "target")


def test_without_parameters_those_of_the_model_are_used(llm: LLM, model: Path) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    (model / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 5, "do_sample": true}')
    try:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=5)
        first, second = (llm.generate("Hello")[0].outputs[0].token_ids for _ in range(2))
        assert first == second == llm.generate("Hello", SamplingParams(temperature=0))[0].outputs[0].token_ids
        engine = AsyncLLM(model)
        assert asyncio.run(answer(engine, "Hello")).outputs[0].token_ids == first
        engine.shutdown()
    finally:
        (model / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="temperature"):  # as callers of vLLM catch it
        SamplingParams(temperature=-1)
