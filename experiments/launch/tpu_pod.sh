#!/bin/bash
# Runs the same command on every host of a Cloud TPU slice; the hosts find each other through the TPU's metadata.
#
#   TPU_NAME=my-pod ZONE=us-central2-b experiments/launch/tpu_pod.sh isoloco:paper178m lowcomm.workers=16
#
# Copies this checkout to every host, installs it there, and runs it. WORKDIR must be a folder that all hosts see,
# such as a mounted Filestore share. Start it again with RESUME=1 to continue after the slice was preempted.
set -euo pipefail

if (($# == 0)) || [[ -z ${TPU_NAME:-} || -z ${ZONE:-} || -z ${WORKDIR:-} ]]; then
    echo "usage: TPU_NAME=... ZONE=... WORKDIR=... $0 NAME[:variant] [key=value ...]" >&2
    exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
archive=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$archive"' EXIT
tar -C "$root" --exclude=./.git --exclude=./.venv --exclude=./.cache --exclude=./runs -czf "$archive" .

on_all() {
    gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --worker=all --command="$1"
}
gcloud compute tpus tpu-vm scp "$archive" "$TPU_NAME:jaxlab.tar.gz" --zone="$ZONE" --worker=all
on_all "mkdir -p jaxlab && tar -C jaxlab -xzf jaxlab.tar.gz && cd jaxlab && python3 -m venv .venv \
    && .venv/bin/pip install -q -c constraints.txt -e '.[tpu]'"
run=$(printf '%q ' .venv/bin/jaxlab run "$@" --distributed --require tpu --workdir "$WORKDIR" ${RESUME:+--resume})
on_all "cd jaxlab && $run"
