#!/usr/bin/env bash
# One node's part of the plan tp4:5,tp1:3 @12 | tp1:8 @4
#
#   bash train.sh NODE_RANK [MASTER_ADDR]
#
# NODE_RANK counts the machines from 0 in the order below, or is by-name: this machine's name says
# it.  MASTER_ADDR is the first of them.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
node_rank=${1:?usage: bash train.sh NODE_RANK [MASTER_ADDR]}
master_addr=${2:-a.example}
master_port=${MASTER_PORT:-29500}

# What install.sh installed beside this file comes first; else the environment as it is.
if [ -x "$here/venv/bin/torchrun" ]; then
    PATH=$here/venv/bin:$PATH
fi
if ! command -v torchrun >/dev/null; then
    echo "train.sh: there is no torchrun on $(hostname): install megatron-hetero with its runtime, or put its environment on the PATH" >&2
    exit 5
fi

# number the GPUs as nvidia-smi does, which the plan's indices follow
export CUDA_DEVICE_ORDER=PCI_BUS_ID
# Megatron wants it with tensor parallelism on GPUs before Blackwell: kernels start in the order of their launches
export CUDA_DEVICE_MAX_CONNECTIONS=1
# unlike nodes may settle on unlike algorithms and hang: one for all (check the values that come back with `megatron-hetero doctor`)
export NCCL_ALGO=${NCCL_ALGO:-Ring}
export NCCL_PROTO=${NCCL_PROTO:-Simple}

if [ "$node_rank" = by-name ]; then
    name=${MEGATRON_HETERO_HOST:-${SLURMD_NODENAME:-$(hostname)}}
    case "$name" in
    a.example) node_rank=0 ;;
    b.example) node_rank=1 ;;
    *) echo "train.sh: $name is none of the machines of this plan" >&2; exit 2 ;;
    esac
fi
case "$node_rank" in
0)  # a: A100-80GB
    num_processes=4
    # the plan's GPUs of this node, in rank order
    export CUDA_VISIBLE_DEVICES=0,1,2,3
    ;;
1)  # b: RTX-4090
    num_processes=2
    # RTX-4090 has no peer-to-peer, and some drivers hang where NCCL tries it
    export NCCL_P2P_DISABLE=${NCCL_P2P_DISABLE:-1}
    # the plan's GPUs of this node, in rank order
    export CUDA_VISIBLE_DEVICES=0,2
    ;;
*)
    echo "train.sh: node rank $node_rank; this plan has 0 to 1" >&2
    exit 2
    ;;
esac

MEGATRON_ARGS=(
    --num-layers 8
    --hidden-size 48
    --num-attention-heads 12
    --seq-length 24
    --max-position-embeddings 24
    --micro-batch-size 1
    --global-batch-size 16
    --lr 1e-4
)
MEGATRON_ARGS+=(--hetero-plan "$here/plan.json")

exec torchrun \
    --nnodes 2 --node-rank "$node_rank" --nproc-per-node "$num_processes" \
    --master-addr "$master_addr" --master-port "$master_port" \
    -m megatron_hetero.pretrain_gpt "${MEGATRON_ARGS[@]}"
