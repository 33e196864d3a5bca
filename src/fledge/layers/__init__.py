"""Transformer building blocks. They work on any leading shape and never own keys and values."""
