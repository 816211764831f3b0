"""Flags of a job that change the length of a step and that no price counts.

The table is complete for flags that choose kernels and for those that asymmetric plans refuse or
overrule: its test sorts every such flag of Megatron.  A price that is added takes its flag out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

from megatron_hetero.flags.support.lookup import support_of
from megatron_hetero.model.flag_table import Option, flag_table, last_of_each
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import CpCommType
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.stock import is_stock

Effect = Literal["longer", "shorter", "longer or shorter"]


class Unpriced(NamedTuple):
    """Flags, divided by spaces, with one effect on a step; `matters` tells in which jobs."""

    effect: Effect
    names: str
    matters: Callable[[Workload], bool] = lambda _: True


UNPRICED: tuple[Unpriced, ...] = (
    # Kernels that fuse less than prices take for granted, or do more.
    Unpriced(
        "longer",
        "--deterministic-mode --disable-jit-fuser --no-bias-dropout-fusion "
        "--disable-bf16-reduced-precision-matmul",
    ),
    Unpriced("longer", "--no-bias-gelu-fusion", lambda job: not job.model.gated_mlp),
    Unpriced("longer", "--no-bias-swiglu-fusion", lambda job: job.model.gated_mlp),
    Unpriced("longer", "--no-rope-fusion", lambda job: job.model.is_rotary),
    Unpriced(
        "longer",
        "--no-masked-softmax-fusion --no-persist-layer-norm --attention-softmax-in-fp32 "
        "--apply-query-key-layer-scaling",
        lambda job: not job.training.flash_attention,
    ),
    # Work beside the passes.
    Unpriced(
        "longer",
        "--log-params-norm --log-num-zeros-in-grad --log-max-attention-logit --qk-clip "
        "--qk-l2-norm --rerun-mode --empty-unused-memory-level --timing-log-level --log-straggler "
        "--gpu-sniff-test-interval --train-sync-interval",
    ),
    Unpriced(
        "longer",
        "--moe-pad-expert-input-to-capacity",
        lambda job: job.model.num_experts > 0,
    ),
    Unpriced(
        "longer",
        "--optimizer-cpu-offload --cpu-offloading-num-layers --fine-grained-activation-offloading "
        "--distribute-saved-activations --ddp-reduce-scatter-with-fp32-accumulation "
        "--no-overlap-p2p-communication",
    ),
    # Kernels that fuse more, and work that is hidden or left out.
    Unpriced(
        "shorter",
        "--fused-residual-rmsnorm --use-te-activation-func --use-transformer-engine-op-fuser "
        "--use-grouped-gemm-for-dense-mlp --overlap-p2p-communication-warmup-flush "
        "--delay-wgrad-compute --defer-embedding-wgrad-compute --cuda-graph-impl "
        "--enable-cuda-graph --external-cuda-graph --optimizer-cuda-graph "
        "--overlap-param-gather-with-optimizer-step "
        "--use-nccl-ub --use-sharp --ddp-pad-buckets-for-high-nccl-busbw "
        "--ddp-average-in-collective",
    ),
    Unpriced(
        "shorter",
        "--moe-router-fusion --overlap-moe-expert-parallel-comm "
        "--moe-expert-capacity-factor",
        lambda job: job.model.num_experts > 0,
    ),
    Unpriced(
        "shorter",
        "--moe-shared-expert-overlap",
        lambda job: job.model.moe_shared_expert_intermediate_size > 0,
    ),
    Unpriced("shorter", "--mla-down-proj-fusion", lambda job: job.model.kv_lora_rank > 0),
    # Attention that looks at fewer tokens: windows, and documents of their own.
    Unpriced("shorter", "--window-size --sft --dataloader-inter-document-masking"),
    Unpriced(
        "longer or shorter",
        "--reset-attention-mask --flash-attention-version --first-last-layers-bf16 "
        "--no-fp8-wgrad --tp-comm-overlap-cfg --num-distributed-optimizer-instances "
        "--ddp-bucket-size --ddp-num-buckets --nccl-communicator-config-path "
        "--pipeline-model-parallel-comm-backend --use-ring-exchange-p2p --cp-comm-type "
        "--high-priority-stream-groups --high-priority-a2a-comm-stream",
    ),
    Unpriced(
        "longer or shorter",
        "--moe-token-dispatcher-type --moe-enable-deepep --moe-flex-dispatcher-backend "
        "--moe-flex-dispatcher-num-sms",
        lambda job: job.model.num_experts > 0,
    ),
)
_AS_PRICED = {
    "--rerun-mode": ("disabled",),
    "--cp-comm-type": get_args(CpCommType),
    "--moe-token-dispatcher-type": ("allgather", "alltoall"),
}
"""Flag -> values, beside the default, that change nothing, each by itself or several times."""


def unpriced_words(plan: Plan, job: Workload) -> str:
    """Say which flags of a job change a step in ways that its price leaves out; empty if there are
    none.

    Args:
        plan: an asymmetric plan overrules or refuses some of them, which other lines say.
        job: with flags that Megatron would read.
    """
    by_plan = () if is_stock(plan) else ("refused", "no effect", "elsewhere")
    given = [
        option
        for option in last_of_each(flag_table().split(job.megatron_args))
        if _is_set(option) and support_of(option.flag).status not in by_plan
    ]
    found: dict[Effect, list[str]] = {}
    for effect, name in _effects(given, job):
        found.setdefault(effect, []).append(name)
    if not found:
        return ""
    listed = "; ".join(f"{effect} with {', '.join(names)}" for effect, names in found.items())
    return f"no price counts these flags of the job: a step takes {listed} than predicted"


def _effects(given: list[Option], job: Workload) -> Iterator[tuple[Effect, str]]:
    for entry in UNPRICED:
        if entry.matters(job):
            names = entry.names.split()
            yield from ((entry.effect, o.name) for o in given if {*o.flag.names} & {*names})


def _is_set(option: Option) -> bool:
    """Tell if an option says something else than Megatron's default, or what is priced alike."""
    default = option.flag.default
    usual = tuple(map(str, default)) if isinstance(default, tuple) else (str(default),)
    is_priced = any({*option.values} == {value} for value in _AS_PRICED.get(option.name, ()))
    return not option.values or not (option.values == usual or is_priced)
