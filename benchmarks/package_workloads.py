"""Pack evaluation sets into src/fledge/evaluation/workloads/data, as far as they may be redistributed.

    python benchmarks/package_workloads.py DIR

DIR holds one JSON lines file for each set. Only what a workload needs is kept: reference answers and other people's
assistant turns are not. The archives are the same bytes whenever the input is.
"""

import argparse
import lzma
from pathlib import Path
from typing import Any

from fledge.evaluation.workloads import DATA, SETS
from fledge.files import json_line, read_json_lines

# Natural-instructions tasks carry their source's licence. These sources forbid redistribution (Yelp), allow no
# commercial use (ASSET, AirDialogue) or state no licence (overruling, TimeTravel).
LEFT_OUT = ("_yelp_", "_asset_", "_air_dialogue_", "_overruling_", "_timetravel_")
KEPT = ("id", "category", "subject", "words", "messages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    source = parser.parse_args().source
    for name in SETS:
        records = [record for _, record in read_json_lines(source / f"{name}.jsonl") if _is_free(record)]
        lines = "".join(json_line({key: record[key] for key in KEPT if key in record}) for record in records)
        packed = lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)
        (DATA / f"{name}.jsonl.xz").write_bytes(packed)
        print(f"{name}: {len(records)} prompts, {len(packed):,} bytes")


def _is_free(record: dict[str, Any]) -> bool:
    return not any(part in record["id"] for part in LEFT_OUT)


if __name__ == "__main__":
    main()
