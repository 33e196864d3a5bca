"""The `fledge` command: its subcommands, and how errors and warnings are printed."""

import os
import sys
import warnings

import typer

from fledge.cli.bench import bench
from fledge.cli.checkpoints import convert, inspect
from fledge.cli.drafters import drift, evaluate
from fledge.cli.generate import demo, generate
from fledge.cli.serve import serve
from fledge.cli.train import train
from fledge.cli.vllm_command import EngineCommand, ServeCommand
from fledge.errors import FledgeError
from fledge.version import __version__

app = typer.Typer(
    name="fledge",
    help="Raise, check and fly EAGLE 3.1 drafters: lossless speculative decoding for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would cut the names of options at 80 columns
)
app.command()(demo)
app.command(cls=EngineCommand)(generate)
app.command(cls=ServeCommand)(serve)
app.command()(inspect)
app.command()(convert)
app.command()(train)
app.command(cls=EngineCommand)(drift)
app.command(name="eval", cls=EngineCommand)(evaluate)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fledge {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def run() -> None:
    """Entry point. A user's mistake is one line and exit status 2, never a traceback."""
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    os.environ["PYTHONSAFEPATH"] = "1"  # Python children import nothing from the working directory
    try:
        app()
    except FledgeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone; else Python prints an error at exit
        sys.exit(141)
    except OSError as error:  # such as a full disk
        if error.strerror is None:
            raise
        print(f"error: {error.filename or 'input or output'}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
