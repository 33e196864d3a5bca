"""What models are measured on: the packaged sets, public sets in their own formats, anyone's conversations."""

from fledge.folders import cache_directory
from fledge.workloads.base import LENGTH_BUCKETS, Message, Prompt, Workload, length_bucket
from fledge.workloads.catalogue import GROUPS, SETS, expand, workload_names
from fledge.workloads.loading import distinct_workloads, load_workload, load_workloads
from fledge.workloads.tokens import tokenised

__all__ = [
    "GROUPS",
    "LENGTH_BUCKETS",
    "SETS",
    "Message",
    "Prompt",
    "Workload",
    "cache_directory",
    "distinct_workloads",
    "expand",
    "length_bucket",
    "load_workload",
    "load_workloads",
    "tokenised",
    "workload_names",
]
