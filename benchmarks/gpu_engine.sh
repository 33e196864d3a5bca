#!/bin/bash
# Times the engine on a machine with a GPU; results go to $OUT (or ./gpu_results).
export PYTHONPATH=src:. PYTHONUNBUFFERED=1
out=${OUT:-gpu_results}
mkdir -p "$out"
python3 -m fledge bench rounds --shape 1b,8b --concurrency 1,4,16,64 "$@" 2>&1 | tee "$out/rounds.log"
for cell in "1b 0 1" "1b 3 1" "8b 0 1" "8b 3 1" "8b 3 64"; do
  # shellcheck disable=SC2086
  python3 benchmarks/profile_round.py $cell 2>&1 | grep -v Warning | tee -a "$out/profile.log"
done
