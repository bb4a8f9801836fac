#!/bin/bash
# Starts one process a host on several GPU machines without a scheduler, over ssh; each uses all GPUs of its host.
#
#   HOSTS="node0 node1" WORKDIR=/shared/runs/one experiments/launch/gpu_hosts.sh isoloco:paper178m lowcomm.workers=16
#
# The checkout and WORKDIR must lie at the same path on every host; the first host coordinates (PORT, default 12355).
# Start it again with RESUME=1 to continue. Ctrl-C stops all hosts, and the run is saved.
set -euo pipefail

if (($# == 0)) || [[ -z ${HOSTS:-} || -z ${WORKDIR:-} ]]; then
    echo "usage: HOSTS=\"host0 host1\" WORKDIR=... $0 NAME[:variant] [key=value ...]" >&2
    exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
read -ra hosts <<<"$HOSTS"
run=$(printf '%q ' .venv/bin/jaxlab run "$@" --distributed --require gpu --workdir "$WORKDIR" ${RESUME:+--resume})

# Each process leaves its id there, so that it can be told to save and stop.
ids=$(printf %q "$WORKDIR.pids")

pids=()
for id in "${!hosts[@]}"; do
    ssh "${hosts[$id]}" "mkdir -p $ids && echo \$\$ >$ids/$id && cd $(printf %q "$root") \
        && export JAX_COORDINATOR_ADDRESS=${hosts[0]}:${PORT:-12355} JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$id \
        && exec $run" </dev/null &
    pids+=($!)
done

stopped=0
stop() {
    stopped=1
    for id in "${!hosts[@]}"; do
        ssh "${hosts[$id]}" "kill -TERM \$(cat $ids/$id)" </dev/null || true
    done
}
trap stop INT TERM
status=0
for pid in "${pids[@]}"; do
    code=0
    wait "$pid" || code=$?
    while ((stopped)); do # the signal cut the wait short; the processes are still saving
        stopped=0 again=0
        wait "$pid" || again=$?
        ((again == 127)) || code=$again # 127: it had ended before
    done
    if ((code != 0)); then
        status=$code
    fi
done
exit "$status"
