#!/bin/bash
# ZeRO-3 on two machines under SLURM, preempted and requeued at will:
#   sbatch --job-name avspo examples/slurm.sh --method avspo [any other flag of examples/train.py]
# trains into outputs/avspo. Submit it from the root of the repository, on a file system that all machines see.
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1   # one launcher a machine; it starts a process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue             # after a preemption the job starts again and resumes
#SBATCH --open-mode=append
#SBATCH --signal=TERM@180     # three minutes before the time limit: finish the step, save, end; submit it again
set -euo pipefail

if [[ " $*" == *" --output_dir"* || " $*" == *" --resume_from_checkpoint"* ]]; then
    echo "error: The output directory should follow from the job's name, and what to resume from that directory," \
        "found --output_dir or --resume_from_checkpoint: use sbatch --job-name." >&2
    exit 1
fi
output_dir=outputs/$SLURM_JOB_NAME
resume=()
if compgen -G "$output_dir/checkpoint-*/checkpoint_complete.json" > /dev/null; then
    resume=(--resume_from_checkpoint true)
fi

MAIN_ADDRESS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MAIN_PORT=$((20000 + SLURM_JOB_ID % 10000))
NUM_PROCESSES=$((SLURM_NNODES * ${SLURM_GPUS_ON_NODE:-8}))
TORCH_ELASTIC_SHUTDOWN_TIMEOUT=170   # seconds that the launcher leaves its processes to save
export MAIN_ADDRESS MAIN_PORT NUM_PROCESSES TORCH_ELASTIC_SHUTDOWN_TIMEOUT

srun bash -c 'exec accelerate launch --config_file accelerate_configs/zero3_multinode.yaml \
    --num_machines "$SLURM_NNODES" --num_processes "$NUM_PROCESSES" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$MAIN_ADDRESS" --main_process_port "$MAIN_PORT" "$@"' launch \
    examples/train.py --output_dir "$output_dir" --enable_jit_checkpoint true "$@" ${resume[@]+"${resume[@]}"}
