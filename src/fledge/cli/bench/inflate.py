"""`fledge bench inflate`: a trained pair at the cost of a larger one."""

import sys
from pathlib import Path

from fledge.cli.command import options, settings_of
from fledge.errors import ConfigError


@options("bench inflate")
def inflate(
    source: str,
    destination: Path,
    *,
    shape: str,
    drafter: list[str] | None = None,
    drafter_out: list[Path] | None = None,
    dtype: str = "auto",
    small_vocab: bool = False,
    seed: int = 0,
    quiet: bool = False,
) -> None:
    """Enlarge a Llama and its EAGLE-3 drafters; they say the same.

    Real acceptance can then be measured at the cost of a model of that size. In float32 the tokens are the same.
    """
    sources, places = drafter or [], drafter_out or []
    if len(sources) != len(places):
        raise ConfigError(f"{len(sources)} --drafter but {len(places)} --drafter-out: give one for each")

    from fledge.bench.inflate import shape_named  # noqa: PLC0415
    from fledge.bench.inflate_files import Inflation, write_inflated  # noqa: PLC0415 - torch takes seconds
    from fledge.devices import choose_dtype  # noqa: PLC0415
    from fledge.progress import Progress  # noqa: PLC0415

    config = shape_named(shape)
    drafters = tuple(zip(sources, places, strict=True))
    own = {"shape_name": shape, "shape": config, "dtype": choose_dtype(dtype), "pad_vocab": not small_vocab}
    with Progress(quiet=quiet).task("writing", config.num_layers + len(sources)) as advance:
        write_inflated(settings_of(Inflation, locals(), **own), advance)
    for place in (destination, *places):
        print(f"wrote {place}", file=sys.stderr)
