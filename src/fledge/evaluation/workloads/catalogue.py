"""The workloads that have a name: what comes with the package, what the hub has, and groups of them.

`data/LICENCES.md` gives origin, licence and attribution of each set that comes with the package.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True)
class PackagedSet:
    """One set in `data/`. `category` is that of all its prompts; None: their own."""

    source: str
    licence: str
    category: str | None = None


SETS: Mapping[str, PackagedSet] = {
    "mt_bench": PackagedSet(source="MT-Bench, lm-sys/FastChat", licence="Apache-2.0"),
    "humaneval": PackagedSet(source="HumanEval, openai/human-eval", licence="MIT", category="coding"),
    "gsm8k": PackagedSet(source="GSM8K test, openai/grade-school-math, 200 of 1,319", licence="MIT", category="math"),
    "math500": PackagedSet(source="MATH-500, the first 200, hendrycks/math", licence="MIT", category="math"),
    "chat_dialogue": PackagedSet(
        source="Schema-Guided Dialogue test, user turns", licence="CC-BY-SA-4.0", category="dialogue"
    ),
    "docs_qa": PackagedSet(
        source="questions on MDN, .NET, Kubernetes and PEP pages",
        licence="CC-BY-SA-2.5 (MDN), CC-BY-4.0 (.NET, Kubernetes), public domain (PEPs)",
        category="qa",
    ),
    "instructions": PackagedSet(
        source="Natural Instructions, 13 tasks",
        licence="by task: CC-BY-4.0, CC-BY-SA-4.0, CC-BY-SA-3.0, MIT",
        category="instructions",
    ),
    "long_context": PackagedSet(
        source="eight novels and QMSum test meetings, 2k to 16k words",
        licence="public domain (novels), MIT (QMSum)",
        category="long_context",
    ),
}

ALIASES = {
    "mtbench": "mt_bench",
    "human_eval": "humaneval",
    "math_500": "math500",
    "natural_instructions": "instructions",  # `fledge drift` has a workload of its own called `instructions`
    "speedbench": "speed_bench",
    "speed_bench/qualitative": "speed_bench",
}

# A group stands for several workloads; SET/PART is one category, sub-category or bucket of a set.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "all": tuple(SETS),
    "short": tuple(name for name in SETS if name != "long_context"),
    "coding": ("humaneval", "mt_bench/coding"),
    "math": ("gsm8k", "math500", "mt_bench/math"),
    "chat": ("mt_bench", "chat_dialogue"),
    "qa": ("docs_qa", "mt_bench/stem", "mt_bench/humanities"),
}

# Public sets on the Hugging Face hub, whole: the files of each as its dataset page showed them in 2026. SPEED-Bench may
# not be redistributed (NVIDIA Evaluation Dataset License) and so is only here.
HUB: Mapping[str, str] = {
    "mt_bench": "hf:HuggingFaceH4/mt_bench_prompts:raw/question.jsonl",
    "humaneval": "hf:openai/openai_humaneval:openai_humaneval/test-*.parquet",
    "gsm8k": "hf:openai/gsm8k:main/test-*.parquet",
    "math500": "hf:HuggingFaceH4/MATH-500:test.jsonl",
    "speed_bench": "hf:nvidia/SPEED-Bench:qualitative/test-*.parquet",
    **{
        f"speed_bench/throughput_{size}": f"hf:nvidia/SPEED-Bench:throughput_{size}/test-*.parquet"
        for size in ("1k", "2k", "8k", "16k", "32k")
    },
}


def canonical(name: str) -> str:
    """The one spelling of a workload's name: `MT-Bench` is `mt_bench`. Unknown names come back as they are."""
    plain = name.lower().replace("-", "_")
    head, slash, part = plain.partition("/")
    plain = ALIASES.get(plain, ALIASES.get(head, head) + slash + part)
    return plain if plain.partition("/")[0] in {*SETS, *GROUPS} or plain in HUB else name


def workload_names() -> tuple[str, ...]:
    """The names of the packaged sets, then of the groups."""
    return (*SETS, *(name for name in GROUPS if name not in SETS))


def expand(name: str) -> tuple[str, ...]:
    """The workloads that a name stands for: those of a group, or itself."""
    known = canonical(name)
    return GROUPS.get(known, (known,))
