"""Transformer building blocks. They accept any leading dimensions and do not own a KV cache."""
