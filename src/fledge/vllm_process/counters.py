"""Reads a vLLM's Prometheus metrics: tokens, requests, and acceptance of drafts."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)(?: \d+)?$")
_POSITION = re.compile(r'position="(\d+)"')
_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')  # on a CPU too


@dataclass(frozen=True, kw_only=True)
class VllmCounters:
    """Totals over all engines of a vLLM since it started, and current gauges."""

    values: Mapping[str, float]  # by name, without the prefix
    accepted_by_depth: tuple[int, ...] = ()  # entry 0 is the first draft
    kv_blocks: int = 0  # of KV cache, in all

    @classmethod
    def read(cls, text: str) -> "VllmCounters":
        """Read the text of `/metrics`. Several engines (data parallel) are summed; the KV cache is their mean."""
        values: dict[str, float] = defaultdict(float)
        accepted: Counter[int] = Counter()
        caches = blocks = 0
        for line in text.splitlines():
            found = _SAMPLE.match(line)
            if found is None or found[1].endswith(("_created", "_bucket")):
                continue
            name, amount = found[1].removesuffix("_total"), float(found[3])
            position = _POSITION.search(found[2] or "")
            if name == "spec_decode_num_accepted_tokens_per_pos" and position is not None:
                accepted[int(position[1])] += int(amount)
            else:
                values[name] += amount
            if name == "cache_config_info" and (size := _BLOCKS.search(found[2] or "")) is not None:
                blocks += int(size[1])
            caches += name == "kv_cache_usage_perc"
        values["kv_cache_usage_perc"] /= max(caches, 1)
        by_depth = tuple(accepted[depth] for depth in range(max(accepted, default=-1) + 1))
        return cls(values=values, accepted_by_depth=by_depth, kv_blocks=blocks)

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)

    @property
    def rounds(self) -> int:
        return int(self["spec_decode_num_drafts"])

    def mean_batch(self, before: "VllmCounters") -> int:
        """Mean number of requests in a step since `before`; 0 if there was no round."""
        name = "iteration_tokens_total_count"  # one observation for each step
        rounds, steps = self.rounds - before.rounds, self[name] - before[name]
        return max(round(rounds / steps), 1) if rounds > 0 and steps > 0 else 0

    @property
    def tally(self) -> Counter[tuple[int, int]]:
        """Rounds by (drafted, accepted), as in `AcceptanceStatistics`.

        vLLM counts rounds that accepted at least j drafts for each j; differences are rounds that accepted exactly j.
        It does not report how deep rounds drafted, so all count as the deepest, as in its own rates.
        """
        depth = len(self.accepted_by_depth)
        reached = (self.rounds, *self.accepted_by_depth, 0)
        exact = {(depth, j): reached[j] - reached[j + 1] for j in range(depth + 1)}
        return Counter({key: count for key, count in exact.items() if count > 0 and depth > 0})
