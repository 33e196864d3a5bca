"""`fledge bench`: how fast, measured. One file per verb."""

import typer

from fledge.cli.bench.compare import compare
from fledge.cli.bench.inflate import inflate
from fledge.cli.bench.offline import offline
from fledge.cli.bench.report import report
from fledge.cli.bench.rounds import rounds
from fledge.cli.bench.serve import serve

bench = typer.Typer(help="Measure speed.", no_args_is_help=True, rich_markup_mode=None)
bench.command()(rounds)
bench.command()(offline)
bench.command()(inflate)
bench.command()(serve)
bench.command()(report)
bench.command()(compare)
