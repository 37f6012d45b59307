#!/bin/bash
# Runs a command, such as torchrun, once on each node of a SLURM step, and tells torchrun where the nodes meet:
#
#     srun --nodes=2 --ntasks-per-node=1 docker/slurm/rendezvous.sh python -m training.launch --nproc-per-node=8 ...

if [ "$SLURM_STEP_NUM_TASKS" != "$SLURM_STEP_NUM_NODES" ]; then
    echo "rendezvous.sh: $SLURM_STEP_NUM_TASKS tasks on $SLURM_STEP_NUM_NODES nodes; give srun --ntasks-per-node=1:" \
        "each starts the ranks of its node" >&2
    exit 1
fi
if [ "$SLURM_STEP_NUM_NODES" -gt 1 ]; then
    export PET_NNODES="$SLURM_STEP_NUM_NODES" PET_RDZV_BACKEND=c10d
    # Two jobs may share a node, so each has a port of its own, below those that the system gives away.
    PET_RDZV_ENDPOINT="$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1):$((20000 + (SLURM_JOB_ID * 16 + SLURM_STEP_ID % 16) % 10000))"
    # A job that was requeued has its number still, and may find the store of its former life.
    PET_RDZV_ID="$SLURM_JOB_ID.$SLURM_STEP_ID.${SLURM_RESTART_COUNT:-0}"
    export PET_RDZV_ENDPOINT PET_RDZV_ID
fi
exec "$@"
