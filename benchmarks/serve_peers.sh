#!/bin/sh
# The servers of Fledge and vLLM on a CPU, with the bundled pair and without its drafter, under the same load, in turns.
#
#     [VLLM_PYTHON=.venv-vllm/bin/python] [FLEDGE=.venv/bin/fledge] [OUT=build/servers-cpu.json] [THREADS=2] [DEPTH=3] \
#         sh benchmarks/serve_peers.sh [options of bench serve ...]
#
# All four servers run all the time; those that nobody asks sleep. float32 and greedy, so the texts must be the same.
set -eu
VLLM_PYTHON=${VLLM_PYTHON:-.venv-vllm/bin/python} FLEDGE=${FLEDGE:-.venv/bin/fledge} OUT=${OUT:-build/servers-cpu.json}
DEPTH=${DEPTH:-3} LOGS=${LOGS:-build/servers} OMP_NUM_THREADS=${THREADS:-2}
MODELS=${MODELS:-src/fledge/bundled}
export OMP_NUM_THREADS
mkdir -p "$LOGS" "$(dirname "$OUT")"
pids=""
trap 'kill $pids 2>/dev/null || true' EXIT INT TERM

fledge_server() { # port, options
    port=$1
    shift
    "$FLEDGE" serve "$MODELS/fledgling" --served-model-name fledgling --dtype float32 --max-model-len 2048 --no-enable-prefix-caching --port "$port" "$@" \
        >"$LOGS/fledge-$port.log" 2>&1 &
    pids="$pids $!"
}
vllm_server() {
    port=$1
    shift
    env HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
        "$VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODELS/fledgling" --served-model-name fledgling \
        --dtype float32 --max-model-len 2048 --no-enable-prefix-caching --port "$port" "$@" >"$LOGS/vllm-$port.log" 2>&1 &
    pids="$pids $!"
}
drafter="{\"method\": \"eagle3\", \"model\": \"$MODELS/fledgling-eagle3.1\", \"num_speculative_tokens\": $DEPTH}"
fledge_server 8201
fledge_server 8202 --speculative-config "$drafter"
vllm_server 8203
vllm_server 8204 --speculative-config "$drafter"
for port in 8201 8202 8203 8204; do # vLLM compiles its model first
    tries=0
    until "$VLLM_PYTHON" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=2)" 2>/dev/null; do
        tries=$((tries + 1))
        if [ $tries -gt 150 ]; then
            echo "no server at port $port after five minutes: see $LOGS" >&2
            exit 1
        fi
        sleep 2
    done
done
"$FLEDGE" bench serve --baseline "Fledge, no speculation" \
    --url "Fledge, no speculation=http://127.0.0.1:8201" --url "Fledge, EAGLE-3.1 depth $DEPTH=http://127.0.0.1:8202" \
    --url "vLLM, no speculation=http://127.0.0.1:8203" --url "vLLM, EAGLE-3.1 depth $DEPTH=http://127.0.0.1:8204" \
    --workload mt_bench --workload humaneval --temperature 0 --out "$OUT" "$@"
