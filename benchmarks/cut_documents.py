"""The 2,000-word documents of `long_context`, cut to several lengths, as workloads for `fledge eval`.

python benchmarks/cut_documents.py DIRECTORY

writes words-250.jsonl to words-2000.jsonl there: of each prompt its first 40 words, which say what the document is, and
its last 250 to 2,000, which end in the question. docs/results/acceptance.md has what came out.
"""

import json
import sys
from pathlib import Path

from fledge.evaluation.workloads import load_workloads

FIRST = 40
LENGTHS = (250, 500, 1000, 1500, 2000)


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (documents,) = load_workloads(["long_context/2k"], sample=None, seed=0)
    for length in LENGTHS:
        lines = []
        for prompt in documents.prompts:
            (message,) = prompt.messages
            words = message["content"].split(" ")
            content = " ".join(words[:FIRST] + words[-length:]) if len(words) > FIRST + length else message["content"]
            about = {"id": prompt.id, "category": f"2000w-{prompt.sub_category}", "words": 2000}
            lines.append(json.dumps({**about, "messages": [{**message, "content": content}]}) + "\n")
        (directory / f"words-{length}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
