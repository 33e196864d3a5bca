"""`fledge serve` with the command line of `vllm serve`: understood, noted or refused in one line."""

import inspect
import json
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from fledge import LLM
from fledge.cli import serve as serve_module
from fledge.cli import vllm_command
from fledge.cli.command import parse_token_count
from fledge.cli.main import app
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.engine.vllm_options import ALIASES, FOREIGN, FOREIGN_NOW, HONOURED, VLLM_VERSION
from fledge.errors import ConfigError
from fledge.server import child
from tests.command_line import fledge

# As the articles that announced EAGLE 3.1 print it; the first is one of them word by word.
ANNOUNCED = """
nvidia/Kimi-K2.6-NVFP4
--trust-remote-code
--tensor-parallel-size 4
--tool-call-parser kimi_k2
--enable-auto-tool-choice
--reasoning-parser kimi_k2
--attention-backend tokenspeed_mla
--speculative-config '{"mannequin":"lightseekorg/kimi-k2.6-eagle3.1-mla","methodology":"eagle3","num_speculative_tokens":3}'
--language-model-only
"""  # noqa: E501 - as it was printed
ORIGINAL = ANNOUNCED.replace("mannequin", "model").replace("methodology", "method")

VALUES = {"--host", "--port", "--speculative-config", "--tool-call-parser", "--reasoning-parser", "--max-model-len"}
FLAGS = {"--enable-auto-tool-choice", "--enable-prefix-caching", "--no-enable-prefix-caching", "--help"}


def translate(words: Sequence[str], values: Collection[str], flags: Collection[str]) -> tuple[list[str], list[str]]:
    given, rest = vllm_command.parse_arguments(words, flags)
    ours, notes = vllm_command.translate(given, values, flags)
    return [*ours, *rest], notes


@pytest.mark.parametrize("command", [ANNOUNCED, ORIGINAL])
def test_the_announced_command_is_told_who_handles_four_gpus(command: str, tmp_path: Path) -> None:
    done = fledge("serve", *shlex.split(command), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: --tensor-parallel-size 4: several GPUs or machines are needed for that, which is vLLM's job: "
        f"{shlex.join(['fledge', 'serve', *shlex.split(command), '--engine', 'vllm'])}"
    )


def test_on_one_gpu_it_is_understood() -> None:
    words = shlex.split(ORIGINAL.replace("--tensor-parallel-size 4", "--tensor-parallel-size 1"))
    ours, notes = translate(words, VALUES, FLAGS)
    assert ours[:3] == ["nvidia/Kimi-K2.6-NVFP4", "--tool-call-parser", "kimi_k2"]
    assert "--enable-auto-tool-choice" in ours
    config = SpeculativeConfig.from_json(ours[ours.index("--speculative-config") + 1])
    assert (config.model, config.method) == ("lightseekorg/kimi-k2.6-eagle3.1-mla", "eagle3")
    assert [note.partition(":")[0] for note in notes] == [
        "--trust-remote-code",
        "--attention-backend",
        "--language-model-only",
    ]
    garbled = shlex.split(ANNOUNCED.replace("--tensor-parallel-size 4", ""))
    ours, _ = translate(garbled, VALUES, FLAGS)
    with pytest.raises(ConfigError, match="unknown speculative_config key 'mannequin'"):
        SpeculativeConfig.from_json(ours[ours.index("--speculative-config") + 1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-tp", "2"], "--tensor-parallel-size 2: several GPUs"),
        (["--tensor_parallel_size=8"], "--tensor-parallel-size 8: several GPUs"),
        (["--pipeline-parallel-size", "2"], "vLLM"),
        (["--data-parallel-size", "2"], "vLLM"),
        (["--enable-expert-parallel"], "--enable-expert-parallel: several GPUs"),
        (["--quantization-config", "{}"], "quantised weights"),
        (["--enable-lora"], "adapters"),
        (["--hot", "0.0.0.0"], "unknown option '--hot'. Did you mean '--host'?"),
        (["--max-modellen", "5"], "Did you mean '--max-model-len'?"),
        (["--tensor-paralel-size", "1"], "Did you mean '--tensor-parallel-size'?"),
        (["--zzzzzz"], "See fledge serve --help."),
        (["-x"], "unknown option '-x'"),
    ],
)
def test_refusals(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        translate(["model", *words], VALUES, FLAGS)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["--tensor-parallel-size", "1", "m"], ["m"]),
        (["-tp=1", "m"], ["m"]),
        (["--disable-log-requests", "m", "--port", "9"], ["m", "--port", "9"]),
        (["--max_model_len=4k"], ["--max-model-len", "4k"]),
        (["--no-enable-prefix-caching"], ["--no-enable-prefix-caching"]),
        (["--port", "-1"], ["--port", "-1"]),
        (["-O3", "m"], ["m"]),
        (["-O", "3", "m"], ["m"]),
        (["--", "--weird"], ["--", "--weird"]),
        (["--speculative-config", "--port", "1"], ["--speculative-config", "--port", "1"]),  # without its value
    ],
)
def test_what_is_left_for_us(words: list[str], ours: list[str]) -> None:
    assert translate(words, VALUES, FLAGS)[0] == ours


def speculation_of(words: list[str]) -> SpeculativeConfig:
    ours, _ = translate(words, VALUES, FLAGS)
    return SpeculativeConfig.from_json(ours[len(ours) - 1 - ours[::-1].index("--speculative-config") + 1])


def test_keys_of_the_speculative_config_can_be_given_one_by_one() -> None:
    words = ["m", "--speculative-config.model", "d", "--speculative_config.num_speculative_tokens=4"]
    found = speculation_of([*words, "-sc.num_speculative_tokens_per_batch_size+", "[1, 4, 3]", "--port", "1"])
    assert (found.model, found.num_speculative_tokens) == ("d", 4)
    assert found.num_speculative_tokens_per_batch_size == [[1, 4, 3]]
    whole = ["--speculative-config", '{"model": "d", "num_speculative_tokens": 2}']
    assert speculation_of(["--speculative-config.num_speculative_tokens", "5", *whole]).num_speculative_tokens == 5
    for words, said in (
        (["--speculative-config.model"], "unknown option '--speculative-config.model'"),
        (["--host.name", "x"], "unknown option '--host.name'"),
        (["--speculative-config", "[]", "--speculative-config.model", "x"], "no JSON object"),
        (["--speculative-config.a", "1", "--speculative-config.a.b", "1"], "no JSON object"),
    ):
        with pytest.raises(ConfigError, match=said):
            translate(words, VALUES, FLAGS)
    assert translate(["--compilation-config.mode", "3", "m"], VALUES, FLAGS)[0] == ["m"]


CONFIG = """
model: some/model
port: 8123
served_model_name: [a, b]
api-key: secret
enable-prefix-caching: false
enforce-eager: true
tensor-parallel-size: 1
speculative-config: {model: d, num_speculative_tokens: 2}
"""


def parsed(*words: str) -> dict[str, Any]:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    found: dict[str, Any] = command.make_context("serve", list(words)).params
    return found


def test_options_come_from_a_file_and_those_of_the_command_line_win(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(CONFIG)
    found = parsed("--config", str(file), "--api-key", "other", "--speculative-config.num_speculative_tokens", "3")
    assert (found["model"], found["port"], found["served_model_name"]) == ("some/model", 8123, ["a", "b"])
    assert (found["api_key"], found["enable_prefix_caching"], found["enforce_eager"]) == (["other"], False, True)
    assert SpeculativeConfig.from_json(found["speculative_config"]).num_speculative_tokens == 3
    found = parsed("mine", f"--config={file}", "--port=9", "--enable-prefix-caching")
    assert (found["model"], found["port"], found["enable_prefix_caching"]) == ("mine", 9, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "none.yaml: cannot be read: No such file"),
        ("port: [", "not valid YAML"),
        ("- a", "expected a mapping"),
        ("prt: 1", "unknown option '--prt'. Did you mean '--port'?"),
        ("tensor-parallel-size: 4", "several GPUs"),
        ("port: many", "Invalid value for '--port'"),
    ],
)
def test_a_file_of_options_that_is_wrong_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / ("none.yaml" if text is None else "server.yaml")
    if text is not None:
        file.write_text(text)
    done = fledge("serve", "--config", str(file), cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def verbs(command: Any, *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield above, command
    for name, one in getattr(command, "commands", {}).items():
        yield from verbs(one, *above, name)


@pytest.mark.parametrize(("words", "command"), list(verbs(typer.main.get_command(app))))
def test_help_at_80_columns_has_every_name_in_full(
    words: tuple[str, ...], command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = fledge(*words, "--help", cwd=tmp_path).stdout
    names = {name for one in command.params for name in (*one.opts, *one.secondary_opts) if name.startswith("-")}
    assert names <= set(re.split(r"[\s,/]+", said))
    assert "…" not in said
    assert not re.search(r"\w\.\.\.\n", said), "the list of verbs is cut"
    assert max(map(len, said.splitlines())) <= 80


def test_every_refusal_is_a_sentence_and_every_option_of_vllms_does_something() -> None:
    for name, option in FOREIGN.items():
        assert name.startswith("--")
        assert option.get("refused") or option.get("note"), name
        assert all(isinstance(value, str) for value in option.get("accepted", ())), name


def test_every_option_of_vllm_0_32_is_known_by_name() -> None:
    """tests/vllm_parity compares the list with vLLM itself."""
    assert VLLM_VERSION == "0.32.0"
    assert len({*HONOURED, *FOREIGN_NOW}) == len(HONOURED) + len(FOREIGN_NOW) == 316
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    ours = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    for name in HONOURED:
        assert ALIASES.get(name, name).partition(".")[0] in ours | {"--model"}, name
    for name, option in FOREIGN_NOW.items():
        words = [name] if option.get("flag") else [name, "unheard-of"]
        if "note" in option:
            assert translate(["m", *words], VALUES, FLAGS) == (["m"], [f"{name}: {option['note']}"])
        else:
            with pytest.raises(ConfigError, match=name):
                translate(words, VALUES, FLAGS)
            for value in option.get("accepted", ()):
                assert translate(["m", name, value], VALUES, FLAGS) == (["m"], [])
        if option.get("flag"):
            assert translate([f"--no-{name[2:]}", "m"], VALUES, FLAGS)[0] == ["m"]


def test_what_vllm_calls_otherwise() -> None:
    found = parsed("--spec-method", "eagle3", "--spec-model=d", "--spec_tokens", "4", "--model", "m", "--dtype", "half")
    assert json.loads(found["speculative_config"]) == {"method": "eagle3", "model": "d", "num_speculative_tokens": 4}
    assert (found["model"], EngineConfig(dtype=found["dtype"]).dtype) == ("m", "float16")
    words = ["--shutdown-timeout", "0", "--device-memory-utilization", "0.5", "--trust-request-chat-template"]
    found = parsed(
        "mine", "--model", "other", *words, "--override-generation-config.top_k", "3", "--numa-bind-nodes", "0", "1"
    )
    assert (found["model"], found["drain_timeout"], found["gpu_memory_utilization"]) == ("mine", 0, 0.5)
    assert found["allow_client_templates"]
    assert found["override_generation_config"] == '{"top_k": 3}'
    assert not parsed("--enforce-eager", "--no-enforce-eager")["enforce_eager"]
    assert EngineConfig(dtype="float", max_model_len=-1) == EngineConfig(dtype="float32")


def test_several_names_in_a_row_and_origins_in_json() -> None:
    values = VALUES | {"--served-model-name", "--api-key"}
    assert translate(["--served-model-name", "a", "b", "--port", "1"], values, FLAGS)[0] == [
        "--served-model-name",
        "a",
        "--served-model-name",
        "b",
        "--port",
        "1",
    ]
    words = ["m", "--api-key", "k", "--host", "h"]
    assert translate(words, values, FLAGS)[0] == words
    assert serve_module._origins(["https://a", '["https://b", "https://c"]']) == ["https://a", "https://b", "https://c"]
    for wrong in ("[", "[1]", ""):
        with pytest.raises(ConfigError):
            serve_module._origins([wrong])


@pytest.mark.parametrize(("text", "length"), [("auto", None), ("4096", 4096), ("4k", 4000), ("4K", 4096)])
def test_lengths(text: str, length: int | None) -> None:
    assert parse_token_count(text) == length


def test_every_option_of_the_engine_is_one_of_the_python_api_with_the_same_default_and_words() -> None:
    """Said once, in EngineConfig: `fledge serve`, `LLM` and its help follow."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {parameter.name: parameter for parameter in command.params}
    signature = inspect.signature(LLM.__init__)
    for one in fields(EngineConfig):
        assert signature.parameters[one.name].default == one.default
        assert f"{one.name}: {one.metadata['help']}" in (LLM.__init__.__doc__ or "")
        if one.name in serve_module.ENGINE_OPTIONS:
            assert options[one.name].default == one.default
            assert options[one.name].help == one.metadata["help"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: found 0, allowed is an integer of at least 1"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8, fp8_e4m3; any other KV cache is vLLM's job"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: found 1.5"),
        ({"device": "cuda:x"}, "device: found 'cuda:x', allowed is auto, cpu or cuda"),
        ({"dtype": "float7"}, "dtype: found 'float7', allowed is auto, float32, float16, bfloat16"),
        ({"max_num_seq": 4}, "unknown engine option 'max_num_seq'. Did you mean 'max_num_seqs'?"),
    ],
)
def test_engine_options_out_of_bounds_are_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**words)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-model-len", "long"], "--max-model-len: found 'long'"),
        (["--kv-cache-dtype", "fp8_e5m2"], "is vLLM's job: fledge serve --kv-cache-dtype fp8_e5m2 --engine vllm"),
        (["--max-num-seqs", "0"], "max_num_seqs: found 0"),
        (["--device", "bogus"], "device: found 'bogus', allowed is auto, cpu or cuda"),
        (["--log-format", "xml"], "--log-format: found 'xml'"),
        (["--chat-template", "none.jinja"], "--chat-template: none.jinja cannot be read: No such file"),
        (["--speculative-config", "{"], "speculative_config: not valid JSON"),
        (["no-such-model"], "no such directory"),
        (["--generation-config", "mine"], "--generation-config: found 'mine'"),
        (["--request-timeout", "0"], "--request-timeout: found 0"),
        (["--tool-call-parser", "herms"], "unknown tool parser 'herms'. Did you mean 'hermes'?"),
        (["--reasoning-parser", "quen3"], "unknown reasoning parser 'quen3'. Did you mean 'qwen3'?"),
        (["--api-key", ""], "a key must not be empty"),
        (["--ssl-keyfile", "key.pem"], "--ssl-certfile is missing"),
        (["--ssl-certfile", "none.pem"], "--ssl-certfile: none.pem: no such file"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    done = fledge("serve", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_engines_process_begins_first_and_ends_with_a_mistake(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports what it needs meanwhile, and makes ready the GPU unless another device is asked for."""
    started: list[tuple[subprocess.Popen[bytes], bool]] = []

    def spawn(commands: int, outputs: int, *, on_gpu: bool) -> subprocess.Popen[bytes]:
        os.close(commands)
        os.close(outputs)
        started.append((subprocess.Popen(["sleep", "60"]), on_gpu))
        return started[-1][0]

    monkeypatch.setattr(child, "spawn", spawn)
    before = signal.getsignal(signal.SIGTERM)
    assert fledge("serve", "no-such-model", "--device", device, cwd=tmp_path).returncode == 2
    ((process, on_gpu),) = started
    assert process.returncode == -signal.SIGKILL
    assert on_gpu == (device == "auto")
    assert signal.getsignal(signal.SIGTERM) is before
    assert fledge("serve", "no-such-model", "--engine", "vllm", cwd=tmp_path).returncode == 2
    assert len(started) == 1, "vLLM is a process of its own"


def test_without_a_model_the_bundled_pair_is_served() -> None:
    assert serve_module._speculation(None, None) == SpeculativeConfig(
        model="fledgling-eagle3.1", num_speculative_tokens=5
    )
    assert serve_module._speculation("some/model", None) is None


def test_sampling_defaults_come_from_the_model(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.9, "eos_token_id": [3]}')
    found = {"temperature": 0.7, "top_p": 0.9}
    assert serve_module._sampling_defaults(tmp_path, "auto", {}) == found
    assert serve_module._sampling_defaults(tmp_path / "no", str(tmp_path), {"top_p": 0.5}) == found | {"top_p": 0.5}
    assert serve_module._sampling_defaults(tmp_path, "vllm", {}) == {}
    assert serve_module._sampling_defaults(tmp_path / "elsewhere", "auto", {}) == {}
    for wrong, said in (({"top_q": 1}, "Did you mean 'top_p'"), ({"top_p": 2}, "top_p: found 2")):
        with pytest.raises(ConfigError, match=said):
            serve_module._sampling_defaults(tmp_path, "vllm", wrong)


def test_a_unix_socket_is_taken_over_only_from_the_dead(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with serve_module._bind_path(path) as first:
        first.listen()
        with pytest.raises(ConfigError, match="Address already in use; see --uds"):
            serve_module._bind_path(path)
    serve_module._bind_path(path).close()


def test_a_taken_port_is_noticed_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        done = fledge("serve", "--port", str(taken), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: cannot listen on 127.0.0.1, port {taken}: Address already in use; see --host and --port"
    ]
    with serve_module._bind("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="cannot listen"):
        serve_module._bind("127.0.0.1", first.getsockname()[1])  # which is still loading
    with pytest.raises(ConfigError, match="--host"):
        serve_module._bind("no.such.host.invalid", 0)


def test_white_space_is_vllms_option() -> None:
    assert serve_module._disables_any_whitespace('{"backend": "auto", "disable_any_whitespace": true}')
    assert not serve_module._disables_any_whitespace(None)
    for wrong in ("[]", "{", '{"disable_any_whitespace": 1}'):
        with pytest.raises(ConfigError, match="--structured-outputs-config"):
            serve_module._disables_any_whitespace(wrong)
