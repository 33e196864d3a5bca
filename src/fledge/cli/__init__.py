"""The command line. A command parses its options, builds a config and calls a library function."""
