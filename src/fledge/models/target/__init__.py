"""The target models. Adding a family means one file here that declares a `FAMILY`."""

import importlib
import pkgutil

from fledge.models.target.family import Family


def _families() -> dict[str, Family]:
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found: list[Family] = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.name: family for family in found}


FAMILIES = _families()
