"""The C layers for CPUs: they wrap a loaded target or drafter, which know nothing of them.

A round on a CPU is some hundred small operations, and launching them from Python takes longer than most of them do.
Here the layers of a model are one call, and all of a round's drafting another. `accelerate` makes models ready; the
C sources are compiled by the machine's own compiler when they are first needed. Without a compiler, or with
FLEDGE_NATIVE=0, or for layers of a kind that is not here, torch does the same work.
"""

from fledge.native.accelerate import accelerate

__all__ = ["accelerate"]
