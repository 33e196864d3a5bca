"""`fledge bench inflate`: a trained pair at the cost of a larger one."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fledge.cli.bench.options import Quiet
from fledge.errors import ConfigError


def inflate(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Target: a directory, a hub or a bundled name.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Where the enlarged target goes; must be new.")],
    *,
    shape: Annotated[str, typer.Option(help="Named shape to enlarge to: 8b, 3b, 1b, ... (see bench rounds).")],
    drafter: Annotated[
        list[str] | None, typer.Option(help="A drafter of the target to enlarge with it. Repeat it.")
    ] = None,
    drafter_out: Annotated[
        list[Path] | None, typer.Option(metavar="DST", help="Where it goes: one for each --drafter, in order.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, float16 or bfloat16.")] = "auto",
    small_vocab: Annotated[
        bool, typer.Option("--small-vocab", help="Keep the small vocabulary instead of the shape's.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the extra weights.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Enlarge a trained Llama target and its EAGLE-3 drafters without changing what they say.

    Real acceptance can then be measured at the cost of a model of that size. In float32 the tokens are the same.
    """
    sources, places = drafter or [], drafter_out or []
    if len(sources) != len(places):
        raise ConfigError(f"{len(sources)} --drafter but {len(places)} --drafter-out: give one for each")

    from fledge.bench.inflate_files import Inflation, write_inflated  # noqa: PLC0415 - torch takes seconds
    from fledge.bench.shapes import shape_named  # noqa: PLC0415
    from fledge.devices import choose_dtype  # noqa: PLC0415
    from fledge.progress import Progress  # noqa: PLC0415

    config = shape_named(shape)
    inflation = Inflation(
        source=source,
        destination=destination,
        shape_name=shape,
        shape=config,
        drafters=tuple(zip(sources, places, strict=True)),
        dtype=choose_dtype(dtype),
        pad_vocab=not small_vocab,
        seed=seed,
    )
    progress = Progress(quiet=quiet)
    with progress.task("writing", config.num_layers + len(sources)) as advance:
        write_inflated(inflation, advance)
    for place in (destination, *places):
        print(f"wrote {place}", file=sys.stderr)
