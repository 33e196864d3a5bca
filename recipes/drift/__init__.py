"""Drift, settled: one experiment that trains, probes and reports drafters of any target. See experiment.yaml."""
