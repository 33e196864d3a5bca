"""`python -m fledge` is the `fledge` command."""

import sys
from pathlib import Path

if not sys.flags.safe_path and Path(sys.path[0]) != Path(__file__).parents[1]:
    del sys.path[0]  # the working directory: `import safetensors` must not import a file of a checkpoint in it

from fledge.cli.main import run

run()
