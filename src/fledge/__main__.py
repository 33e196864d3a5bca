"""`python -m fledge` is the `fledge` command."""

import sys
from pathlib import Path

if not sys.flags.safe_path and Path(sys.path[0]) != Path(__file__).parents[1]:
    del sys.path[0]  # the working directory, perhaps a checkpoint's: `import safetensors` must not find a file there

from fledge.cli.main import run

run()
