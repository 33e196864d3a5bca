"""GPU kernels, one public function or a tight pair per file, each beside a plain-torch reference of the same contract.

The public function runs the Triton kernel on CUDA tensors and the reference elsewhere, where Triton need not be
installed; for `rope_store` and `paged_attention` the caller makes that choice. Kernels depend on tensors only, not on
other parts of Fledge. All can be captured in a CUDA graph: none synchronises, and grids and allocations depend on
shapes and host integers only. Launch parameters follow from shapes by rules that each file states, without autotuning.
"""
