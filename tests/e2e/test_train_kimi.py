"""The pair that the announcement of EAGLE 3.1 serves, in small: a Kimi, and an MLA drafter that `fledge train` made."""

import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from fledge import LLM, SamplingParams
from tests.command_line import fledge
from tests.forking import ForkedCommand
from tests.tiny_models import TARGET_CONFIGS
from tests.tiny_training import write_run
from tests.unit.cli.test_serve_options import ORIGINAL

PROMPT = "the cat sat"


@pytest.fixture(scope="module", name="run")
def _run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("kimi")
    sections: dict[str, Any] = {"drafter": {"attention": "mla"}}
    sections |= {"fit": {"candidates": 1, "drift_every": 12}, "eval": {"max_prompts": 2}}
    recipe = write_run(root, like=TARGET_CONFIGS["kimi-k2"], **sections)
    done = fledge("train", str(recipe), "--json", cwd=root)
    assert done.returncode == 0, done.stderr
    (root / "result.json").write_text(done.stdout)
    return root


def test_it_has_learnt_and_fits(run: Path) -> None:
    summary = json.loads((run / "result.json").read_text())["stages"]["eval"]["summary"]
    assert summary["acceptance_length"] > 1.1
    assert summary["different_answers"] == 0
    config = json.loads((run / "run" / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert (config["kv_lora_rank"], config["q_lora_rank"], config["fc_norm"]) == (12, 10, True)
    checked = fledge("inspect", str(run / "run" / "drafter"), "--target", str(run / "target"), cwd=run)
    assert checked.returncode == 0, checked.stdout
    assert "0 errors, 0 warnings" in checked.stdout


def test_the_announced_command_serves_it_on_one_device(run: Path) -> None:
    changes = {
        "--tensor-parallel-size 4": "--tensor-parallel-size 1",
        "nvidia/Kimi-K2.6-NVFP4": "target",
        "lightseekorg/kimi-k2.6-eagle3.1-mla": "run/drafter",
        '_tokens":3': '_tokens":3,"adaptive":false',  # how deep to draft would depend on how busy this machine is
    }
    command = functools.reduce(lambda text, change: text.replace(*change), changes.items(), ORIGINAL)
    server = ForkedCommand("serve", *shlex.split(command), "--port", "0", "--threads", "1", cwd=run)
    try:
        lines = iter(server.stderr)
        url = next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
    finally:
        server.terminate()
        server.communicate(timeout=60)
    (plain,) = LLM(run / "target", device="cpu").generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=24))
    assert answer["choices"][0]["text"] == plain.outputs[0].text
    counted = re.findall(r"^fledge_spec_decode_num_(drafts|accepted_tokens)_total\S* (\S+)$", metrics, re.MULTILINE)
    assert all(float(count) > 0 for count in dict(counted).values())
    assert len(counted) == 2
