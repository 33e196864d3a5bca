"""The list of vLLM's options that `fledge serve` knows is vLLM's own. Run by `make test-vllm`."""

import json
import os
import subprocess

import pytest

from fledge.engine.vllm_options import ALIASES, FOREIGN_NOW, HONOURED, SEVERAL_VALUES, VLLM_VERSION

VLLM_PYTHON = os.environ.get("FLEDGE_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM_PYTHON is None, reason="FLEDGE_VLLM_PYTHON is not set (make test-vllm sets it)"),
]

LIST = """
import json
from vllm import __version__
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

options = make_arg_parser(FlexibleArgumentParser())._actions
print(json.dumps([__version__, [[one.option_strings, one.nargs] for one in options if one.option_strings]]))
"""


def test_every_option_of_vllms_is_known_and_takes_as_many_values() -> None:
    done = subprocess.run([str(VLLM_PYTHON), "-c", LIST], capture_output=True, text=True, check=True)
    version, options = json.loads(done.stdout.splitlines()[-1])
    assert version == VLLM_VERSION
    known = {*HONOURED, *FOREIGN_NOW}
    for names, nargs in options:
        found = {ALIASES.get(name, name) for name in names if name not in HONOURED and not name.startswith("--no-")}
        found |= {name for name in names if name in HONOURED}
        if "--help" not in names:
            assert found <= known, names
            (name,) = found & known
            known.remove(name)
            assert name in HONOURED or FOREIGN_NOW[name].get("flag", False) == (nargs == 0), name
            assert (name in SEVERAL_VALUES) == (nargs == "+"), name
    assert not known
