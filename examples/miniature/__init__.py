"""A target and two drafters so small that they are raised on the spot, and a demonstration with them.

`python -m examples.miniature` trains a Llama target on Python's own documentation, then an EAGLE-3 and an EAGLE-3.1
drafter for it, and decodes with and without them. It needs no network and no GPU.
"""
