"""`python -m fledge` is the `fledge` command."""

from fledge.cli.main import run

run()
