"""Named workloads, one dialogue loop through an engine, acceptance by workload."""
