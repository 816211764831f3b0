"""Batches of `--step-batch-size-schedule` that a plan cannot divide among the replicas."""

from __future__ import annotations

from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.stock import is_stock


def undivided_batches(plan: Plan) -> tuple[int, ...]:
    """Return the batches, in sequences, that give some replica no whole number of micro-batches.

    Every replica keeps its part of the plan's global batch as the batch grows
    (`runtime.batches`). The result is empty without a schedule, for a plan that stock Megatron
    runs, and for a text that Megatron cannot read (it wants THRESHOLD:BATCH, divided by blanks) and
    refuses by itself.
    """
    if plan.workload is None or is_stock(plan):
        return ()
    options = last_of_each(flag_table().split(plan.workload.megatron_args))
    texts = [o.values[0] for o in options if o.name == "--step-batch-size-schedule" and o.values]
    counts = [replica.num_micro_batches for replica in plan.replicas]
    whole = plan.workload.training.global_batch_size
    # Each word is THRESHOLD:BATCH.
    batches = [batch for text in texts for _, _, batch in (w.partition(":") for w in text.split())]
    if not all(batch.isdecimal() for batch in batches):
        return ()
    found = sorted({int(batch) for batch in batches})
    # A replica's part of a batch is count / whole of it, in whole micro-batches.
    return tuple(batch for batch in found if any(count * batch % whole for count in counts))
