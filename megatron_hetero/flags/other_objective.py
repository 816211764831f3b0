"""Objective of a plan whose micro-batch sizes differ from the job's."""

from __future__ import annotations

from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.plan.plan import Plan

_BALANCED_WITHIN_A_MICRO_BATCH = ("aux_loss",)


def other_objective(plan: Plan) -> str | None:
    """Explain why another micro-batch size changes the objective of this job; None if it does not.

    Without `--calculate-per-token-loss` Megatron averages over the tokens of each micro-batch, then
    over micro-batches. Where micro-batches have unequal token counts, the weight of a token then
    depends on the sequences in its micro-batch.
    """
    if plan.workload is None:
        return None
    training, model = plan.workload.training, plan.workload.model
    sizes = sorted({r.micro_batch_size or training.micro_batch_size for r in plan.replicas})
    if sizes == [training.micro_batch_size]:
        return None
    given = {o.name: o for o in last_of_each(flag_table().split(plan.workload.megatron_args))}
    reasons = []
    # A mean of means weighs tokens by their micro-batch.
    if not training.per_token_loss:
        masked = "--eod-mask-loss masks" if "--eod-mask-loss" in given else "where you mask"
        reasons.append(
            f"{masked} losses, another size weighs tokens otherwise; --calculate-per-token-loss "
            "weighs all alike under any size"
        )
    # Megatron balances by aux_loss unless it is told otherwise.
    balance = given.get("--moe-router-load-balancing-type")
    kinds = _BALANCED_WITHIN_A_MICRO_BATCH if balance is None else balance.values
    if model.num_experts and set(kinds) & set(_BALANCED_WITHIN_A_MICRO_BATCH):
        reasons.append("experts are balanced within a micro-batch (aux_loss)")
    if not reasons:
        return None
    unit = "sequence" if sizes == [1] else "sequences"
    return (
        f"micro-batches of {' and '.join(map(str, sizes))} {unit}, the job says "
        f"{training.micro_batch_size}: {'; '.join(reasons)}"
    )
