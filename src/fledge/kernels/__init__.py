"""GPU kernels, one public function or a tight pair per file, each beside a plain-torch reference of the same contract.

The public function runs the Triton kernel on CUDA tensors and the reference everywhere else, where Triton need not
be installed; those of `rope_store` and `paged_attention` leave that choice to the storage that calls them. The kernels
know tensors and nothing else of Fledge. None of them synchronises, none allocates by a value that lives on the device,
and every grid follows from shapes and host integers: all can be captured in a CUDA graph. Launch parameters come from
the shapes by simple rules that each file states, never from tuning at run time.
"""
