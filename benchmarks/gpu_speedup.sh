#!/bin/sh
# The bundled pair at the cost of large shapes, on one GPU: no speculation, EAGLE-3 and EAGLE-3.1.
#
#     [OUT=build/gpu] [SHAPES="8b 1b"] [MINUTES=2.5] [DEPTH_MINUTES=0.9] [OPTIONS="..."] sh benchmarks/gpu_speedup.sh
#
# For each shape: K = 3 and 5 at concurrency 1, 4, 16 and 64; then more depths at 1. A run begins no cell after its
# minutes, and says in its results what is missing. `fledge bench report "$OUT"/*.json` makes the page.
set -eu
PYTHON=${PYTHON:-python}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
OUT=${OUT:-build/gpu} MINUTES=${MINUTES:-2.5} DEPTH_MINUTES=${DEPTH_MINUTES:-0.9} OPTIONS=${OPTIONS:-}
if [ -z "${SHAPES:-}" ]; then # a model of more layers than the 1b shape has needs one that is as deep
    SHAPES="8b $("$PYTHON" -c 'from pathlib import Path
from fledge.checkpoints.bundled import TARGET
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import read_target_config
print("1b" if read_target_config(resolve(TARGET)).num_layers <= 16 else "1b-deep")')"
fi
mkdir -p "$OUT"
measure() { # name, minutes, options; a run that fails must not stop the next
    name=$1 minutes=$2
    shift 2
    # shellcheck disable=SC2086
    "$PYTHON" -m fledge bench offline --workload humaneval --workload mt_bench --max-tokens 128 \
        --minutes "$minutes" --out "$OUT/$name.json" "$@" $OPTIONS || echo "$name: ended with $?" >&2
}
for shape in $SHAPES; do
    measure "offline-$shape" "$MINUTES" --inflate "$shape" --depth 3,5 --concurrency 1,4,16,64 --repeats 2 \
        --title "The bundled pair at the cost of the shape $shape"
done
for shape in $SHAPES; do
    measure "depths-$shape" "$DEPTH_MINUTES" --inflate "$shape" --depth 2,3,4,5,7 --concurrency 1 --requests 6 \
        --repeats 1 --title "Depths at concurrency 1, at the cost of the shape $shape"
done
