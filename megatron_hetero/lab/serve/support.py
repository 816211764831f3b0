"""What can be served: flags of every replica, and models and layouts that are refused."""

from __future__ import annotations

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.plan.plan import Plan

SERVED_FLAGS = (
    "--transformer-impl=local",
    "--skip-train",
    "--finetune",
    "--no-load-optim",
    "--no-load-rng",
    "--exit-on-missing-checkpoint",
    "--ckpt-format=torch_dist",
    "--attention-dropout=0",
    "--hidden-dropout=0",
    "--mock-data",
    "--micro-batch-size=1",
    "--train-iters=1",
    "--lr=1e-4",
    "--eval-iters=0",
    "--eval-interval=1000",
    "--moe-token-dispatcher-type=alltoall",
    "--distributed-timeout-minutes=2",
    "--hetero-stall-limit=0",
)
"""Flags of every served replica.  The engine has limits of its own, so the watch of training is
off."""

REFUSED = (
    (
        "--mtp-num-layers",
        lambda a: a.mtp_num_layers is not None,
        "leave it out; layers that predict further tokens serve no purpose here",
    ),
    (
        "--moe-expert-capacity-factor",
        lambda a: a.moe_expert_capacity_factor is not None,
        "leave it out; which tokens are dropped would depend on the requests beside",
    ),
    ("--fp8-format", lambda a: a.fp8 is not None, "serve in bf16, fp16 or fp32"),
    (
        "--position-embedding-type mrope",
        lambda a: a.position_embedding_type == "mrope",
        "serve the model with vLLM or SGLang",
    ),
    (
        "--multi-latent-attention",
        lambda a: a.multi_latent_attention,
        "serve the model with vLLM or SGLang; latents are not cached here yet",
    ),
)
"""Models that are not served yet."""


def checked_plan(plan: Plan | None) -> Plan:
    """Return the plan of a replica.

    Raises:
        UsageError: there is none, or it has several replicas.
        UnsupportedError: its stages have chunks, context parallelism or precisions of their own.
    """
    if plan is None:
        raise UsageError("serving needs a layout: --hetero-layout 'tp2:3,tp1:1', or --hetero-plan")
    if len(plan.replicas) > 1:
        raise UsageError(
            f"the layout has {len(plan.replicas)} replicas; each is served by processes of its "
            "own, and a router divides the requests among them (megatron-hetero route)"
        )
    # Abilities of training that serving lacks, all named at once.
    stages = plan.replicas[0].stages
    found = []
    if plan.layout.has_context_parallel:
        found.append("context parallelism (cp)")
    if plan.layout.has_sharded_layers:
        found.append("sharded layers (z)")
    if any(len(stage.chunks) > 1 for stage in stages):
        found.append("several chunks of the model on a stage")
    if any(stage.precision is not None for stage in stages):
        found.append("a precision of a stage's own")
    if found:
        raise UnsupportedError(f"served layouts cannot have {' or '.join(found)} yet")
    return plan
