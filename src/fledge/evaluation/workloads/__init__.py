"""What models are measured on: the packaged sets, public sets in their own formats, anyone's conversations."""

from fledge.evaluation.workloads.base import LENGTH_BUCKETS, Prompt, Workload, length_bucket, spread
from fledge.evaluation.workloads.catalogue import (
    GROUPS,
    SETS,
    canonical,
    distinct_workloads,
    expand,
    load_workload,
    load_workloads,
    workload_names,
)
from fledge.evaluation.workloads.tokens import tokenised, with_token_ids

__all__ = [
    "GROUPS",
    "LENGTH_BUCKETS",
    "SETS",
    "Prompt",
    "Workload",
    "canonical",
    "distinct_workloads",
    "expand",
    "length_bucket",
    "load_workload",
    "load_workloads",
    "spread",
    "tokenised",
    "with_token_ids",
    "workload_names",
]
