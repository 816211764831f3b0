"""The schedule that the runtime executes for a plan."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.plan.check_structure import launched_forwards
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.one_f_one_b import one_f_one_b
from megatron_hetero.schedule.programme import Schedule


def replica_schedule(plan: Plan, replica: int) -> Schedule:
    """Programmes of one replica of a valid plan: 1F1B with the plan's launch counts."""
    stages = plan.replicas[replica].stages
    counts = [launched_forwards(plan, replica, s) for s in range(len(stages))]
    return one_f_one_b(len(stages), plan.replicas[replica].num_micro_batches, counts)


def check_schedules(plan: Plan) -> None:
    """Prove that every replica of a valid plan can run to its end.

    Raises:
        CheckFailedError: names the replica and what waits for what.
    """
    proved = set()
    for r, replica in enumerate(plan.replicas):
        # What a schedule is made of; replicas that are alike are proved once.
        alike = tuple(replace(s, devices=()) for s in replica.stages), replica.num_micro_batches
        if alike in proved:
            continue
        proved.add(alike)
        try:
            check_schedule(replica_schedule(plan, r))
        except CheckFailedError as error:
            raise CheckFailedError(f"replica {r}: {error}") from error
