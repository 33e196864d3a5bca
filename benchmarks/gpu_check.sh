#!/bin/bash
# Checks and times the kernels on a machine with a GPU; results go to $OUT (or ./gpu_results).
export PYTHONPATH=src:. PYTHONUNBUFFERED=1
out=${OUT:-gpu_results}
mkdir -p "$out"
python3 tests/gpu/test_kernels.py rms_norm swiglu rope argmax accept sample > "$out/tests_a.log" 2>&1 &
python3 tests/gpu/test_kernels.py paged_attention_shapes paged_attention_long paged_attention_b paged_attention_absent caches captured > "$out/tests_b.log" 2>&1 &
python3 tests/gpu/test_kernels.py windows_and_trees > "$out/tests_c.log" 2>&1 &
python3 tests/gpu/test_kernels.py prefill > "$out/tests_d.log" 2>&1 &
wait
cat "$out"/tests_?.log
python3 benchmarks/kernel_times.py --json "$out/kernels.json" 2>&1 | grep -v '^{' | tee "$out/bench.log"
if [ "$1" = sweep ]; then python3 benchmarks/kernel_times.py --sweep 2>&1 | tee "$out/sweep.log"; fi
