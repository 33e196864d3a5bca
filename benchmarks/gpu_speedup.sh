#!/bin/sh
# The bundled pair at the cost of large shapes, on one GPU: no speculation, EAGLE-3 and EAGLE-3.1.
#
#     [OUT=build/gpu] [SHAPES="8b 1b"] [MINUTES=8] [OPTIONS="..."] sh benchmarks/gpu_speedup.sh
#
# For each shape: five depths at concurrency 1, 4, 16 and 64 on code and chat; then the pair as it is on seven sets, one
# request at a time. Ten minutes on an H200. A run begins no cell after its minutes, and says in its results what is
# missing. `fledge bench report "$OUT"/*.json` makes the page.
set -eu
PYTHON=${PYTHON:-python}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
OUT=${OUT:-build/gpu} MINUTES=${MINUTES:-8} OPTIONS=${OPTIONS:-}
if [ -z "${SHAPES:-}" ]; then # a model of more layers than the 1b shape has needs one that is as deep
    SHAPES="8b $("$PYTHON" -c 'from pathlib import Path
from fledge.checkpoints.source import TARGET, resolve
from fledge.checkpoints.target import read_target_config
print("1b" if read_target_config(resolve(TARGET)).num_layers <= 16 else "1b-deep")')"
fi
mkdir -p "$OUT"
measure() { # name, options; a run that fails must not stop the next
    name=$1
    shift
    # shellcheck disable=SC2086
    "$PYTHON" -m fledge bench offline --repeats 3 --minutes "$MINUTES" --out "$OUT/$name.json" "$@" $OPTIONS \
        || echo "$name: ended with $?" >&2
}
for shape in $SHAPES; do
    measure "speedup-$shape" --inflate "$shape" --depth 2,3,4,5,7 --concurrency 1,4,16,64 --max-tokens 96 \
        --workload humaneval --workload mt_bench --title "The bundled pair at the cost of the shape $shape"
done
measure speedup-fledgling --depth 3,5 --concurrency 1 --requests 6 --max-tokens 128 --workload mt_bench \
    --workload humaneval --workload gsm8k --workload math500 --workload chat_dialogue --workload docs_qa \
    --workload instructions --title "The bundled pair as it is, one request at a time"
