"""Megatron's flags of the cases of `gpu_steps.py`: layers of real size that train on one card."""

from __future__ import annotations

from collections.abc import Mapping

_BASE = (
    "--micro-batch-size=1 --global-batch-size=4 --attention-dropout=0 --hidden-dropout=0 --bf16 "
    "--seq-length=4096 --max-position-embeddings=4096 --swiglu --normalization=RMSNorm "
    "--disable-bias-linear --position-embedding-type=rope --group-query-attention "
    "--untie-embeddings-and-output-weights"
)
_LLAMA = (
    f"{_BASE} --num-layers=4 --hidden-size=4096 --ffn-hidden-size=14336 "
    "--num-attention-heads=32 --num-query-groups=8 --vocab-size=128256"
)
_SHORT = "--seq-length=2048 --max-position-embeddings=2048"
_QWEN = (
    f"{_LLAMA} --num-layers=2 --hidden-size=2048 --ffn-hidden-size=6144 --num-query-groups=4 "
    "--vocab-size=32000 --kv-channels=128 --num-experts=128 --moe-router-topk=8 "
    "--moe-ffn-hidden-size=768 --moe-router-load-balancing-type=aux_loss --moe-aux-loss-coeff=1e-3"
)
_MIXTRAL = f"{_LLAMA} --num-layers=1 --vocab-size=32000 --num-experts=8 --moe-router-topk=2"
_EXCHANGED = "--moe-token-dispatcher-type=alltoall"
_FP8 = "--fp8-format=hybrid"
CASES: Mapping[str, str] = {
    "llama-8b": _LLAMA,
    "small": (
        f"{_LLAMA} {_SHORT} --num-layers=24 --hidden-size=1024 --ffn-hidden-size=2816 "
        "--num-attention-heads=16 --micro-batch-size=4 --global-batch-size=16 --vocab-size=32000"
    ),
    "qwen-30b, grouped": f"{_QWEN} {_EXCHANGED} --moe-grouped-gemm",
    "llama-8b, fp8 tensorwise": f"{_LLAMA} {_FP8} --fp8-recipe=tensorwise",
    "mixtral, grouped": f"{_MIXTRAL} {_EXCHANGED} --moe-grouped-gemm",
    "gpt-13b": (
        "--micro-batch-size=2 --global-batch-size=8 --attention-dropout=0 --hidden-dropout=0 "
        f"--bf16 --num-layers=4 --hidden-size=5120 --num-attention-heads=40 {_SHORT} "
        "--vocab-size=50304"
    ),
    "llama-8b, unfused attention": f"{_LLAMA} {_SHORT} --attention-backend=unfused",
    "llama-8b, gradients in 16 bits": f"{_LLAMA} --grad-reduce-in-bf16",
    "llama-8b, fp8 delayed": (
        f"{_LLAMA} {_FP8} --fp8-recipe=delayed --fp8-amax-history-len=1024 "
        "--fp8-amax-compute-algo=max"
    ),
    "llama-8b, fp8 blockwise": f"{_LLAMA} {_FP8} --fp8-recipe=blockwise",
    "llama-8b, local layers": f"{_LLAMA} {_SHORT} --transformer-impl=local",
    "qwen-30b, single experts": f"{_QWEN} {_EXCHANGED}",
    "qwen-30b, gathered": f"{_QWEN} --moe-token-dispatcher-type=allgather --moe-grouped-gemm",
    "llama-8b, recompute": (
        f"{_LLAMA} --recompute-granularity=full --recompute-method=uniform "
        "--recompute-num-layers=1"
    ),
    "llama-8b, fused loss": f"{_LLAMA} --cross-entropy-loss-fusion",
}
"""Flags by name; of a flag given twice the last counts."""
