"""What vLLM has, by its own word, is what docs/compatibility.md and `fledge serve` know of it (`make test-vllm`)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fledge.engine.vllm_options import ALIASES, FOREIGN_NOW, HONOURED, SEVERAL_VALUES, VLLM_VERSION

VLLM_PYTHON = os.environ.get("FLEDGE_VLLM_PYTHON")
LISTS = Path(__file__).parents[2] / "tools" / "vllm-0.32.yaml"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM_PYTHON is None, reason="FLEDGE_VLLM_PYTHON is not set (make test-vllm sets it)"),
]

SCRIPT = """
import json
from vllm import __version__
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

options = make_arg_parser(FlexibleArgumentParser())._actions
print(json.dumps({
    "version": __version__,
    "options": [[one.option_strings, one.nargs] for one in options if one.option_strings],
    "chat": sorted(ChatCompletionRequest.model_fields),
    "completions": sorted(CompletionRequest.model_fields),
    "tool_parsers": sorted(set(ToolParserManager.list_registered())),
    "reasoning_parsers": sorted(set(ReasoningParserManager.list_registered())),
}))
"""


@pytest.fixture(name="vllm", scope="module")
def _vllm() -> dict[str, Any]:
    done = subprocess.run([str(VLLM_PYTHON), "-c", SCRIPT], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_every_option_of_vllms_is_known_and_takes_as_many_values(vllm: dict[str, Any]) -> None:
    assert vllm["version"] == VLLM_VERSION
    known = {*HONOURED, *FOREIGN_NOW}
    for names, nargs in vllm["options"]:
        found = {ALIASES.get(name, name) for name in names if name not in HONOURED and not name.startswith("--no-")}
        found |= {name for name in names if name in HONOURED}
        if "--help" not in names:
            assert found <= known, names
            (name,) = found & known
            known.remove(name)
            assert name in HONOURED or FOREIGN_NOW[name].get("flag", False) == (nargs == 0), name
            assert (name in SEVERAL_VALUES) == (nargs == "+"), name
    assert not known


@pytest.mark.parametrize("kind", ["version", "chat", "completions", "tool_parsers", "reasoning_parsers"])
def test_the_lists_are_vllms(vllm: dict[str, Any], kind: str) -> None:
    assert yaml.safe_load(LISTS.read_text(encoding="utf-8"))[kind] == vllm[kind]
