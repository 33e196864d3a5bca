"""What models are measured on: the packaged sets, public sets in their own formats, anyone's conversations."""

from fledge.evaluation.conversations import Message
from fledge.evaluation.workloads.base import LENGTH_BUCKETS, Prompt, Workload, length_bucket
from fledge.evaluation.workloads.catalogue import GROUPS, SETS, expand, workload_names
from fledge.evaluation.workloads.loading import distinct_workloads, load_workload, load_workloads
from fledge.evaluation.workloads.tokens import tokenised
from fledge.files import cache_directory

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
