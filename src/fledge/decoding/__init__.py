"""Lossless speculative decoding as pure functions, and a reference loop that uses them.

Reading order: `sampling` (the target's distribution), `acceptance` (which drafts to keep, and why the output does not
change), `tree` and `drafting` (how tokens are proposed), `reference` (the loop).
"""
