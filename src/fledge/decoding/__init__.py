"""Lossless speculative decoding as pure functions, and the reference loop that puts them together.

Reading order: `sampling` (what the target would do), `acceptance` (why speculation does not change it), `tree` and
`drafting` (what is proposed), `reference` (the loop).
"""
