#!/bin/bash
# One process a GPU on a Slurm cluster; JAX finds the other processes from Slurm's own variables.
#
#   sbatch --nodes=2 --gpus-per-node=8 experiments/launch/slurm.sh isoloco:paper178m lowcomm.workers=16
#
# VENV names the virtual environment (default: .venv), WORKDIR a run folder that all nodes see. A job that is stopped
# or runs out of time gets SIGTERM 2 minutes before, saves, and is queued again; it then continues in the same folder.
#SBATCH --job-name=jaxlab
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=jaxlab-%j.log
#SBATCH --open-mode=append
set -euo pipefail

if (($# == 0)); then
    echo "usage: sbatch [options] $0 NAME[:variant] [key=value ...]" >&2
    exit 2
fi
workdir=${WORKDIR:-runs/slurm-$SLURM_JOB_ID}
resume=()
if [[ -e $workdir/config.json ]]; then
    resume=(--resume)
fi
# A coordinator reached through a proxy times out.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY
srun --kill-on-bad-exit=1 "${VENV:-.venv}/bin/jaxlab" run "$@" \
    --distributed --require gpu --workdir "$workdir" "${resume[@]}"
# A run that SIGTERM stopped exits with 0 as well, but has no report yet.
if [[ ! -e $workdir/report.md ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
