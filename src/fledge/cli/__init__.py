"""The command line: one file per verb. A command parses, builds a config and calls; it holds no logic."""
