"""The schedule that the runtime executes for a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from megatron_hetero.errors import CheckFailedError, PlanFormatError
from megatron_hetero.plan.chunks import chain
from megatron_hetero.plan.in_flight import num_in_flight
from megatron_hetero.plan.order import Letter, Pass, format_order, parse_order
from megatron_hetero.plan.plan import Plan, ScheduleName
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.orders.one_f_one_b import one_f_one_b
from megatron_hetero.schedule.programme import (
    Operation,
    OperationKind,
    Programme,
    Schedule,
    build_schedule,
)

_KINDS: dict[Letter, OperationKind] = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
}


def replica_schedule(plan: Plan, replica: int) -> Schedule:
    """Build the programmes of one replica of a valid plan: its stages' orders, or 1F1B with launch
    counts."""
    stages = plan.replicas[replica].stages
    num_micro_batches = plan.replicas[replica].num_micro_batches
    orders = [stage.order for stage in stages if stage.order is not None]
    if not orders:
        counts = [num_in_flight(plan, replica, s) for s in range(len(stages))]
        return one_f_one_b(len(stages), num_micro_batches, counts)
    return of_orders(tuple(orders), num_micro_batches, chain(plan.replicas[replica]))


@lru_cache(maxsize=16)
def of_orders(orders: tuple[str, ...], num_micro_batches: int, chain: tuple[int, ...]) -> Schedule:
    """Build the programmes of orders; replicas alike share theirs."""
    return build_schedule([operations(order) for order in orders], num_micro_batches, chain)


def operations(order: str) -> tuple[Operation, ...]:
    """Read an order's computations, with the micro-batches counted."""
    # Passes of each letter and chunk so far: their number is the micro-batch's.
    done: Counter[Pass] = Counter()
    found = []
    for letter, chunk in parse_order(order):
        found.append(Operation(_KINDS[letter], done[letter, chunk], chunk))
        done[letter, chunk] += 1
    return tuple(found)


def order_of(programme: Programme) -> str:
    """Write a programme's computations as a plan has them."""
    # Messages are left out: `build_schedule` completes them from the computations.
    letters = {kind: letter for letter, kind in _KINDS.items()}
    return format_order(
        (letters[operation.kind], operation.chunk)
        for instruction in programme
        for operation in instruction
        if operation.kind in letters
    )


def with_schedule(plan: Plan, replica: int, schedule: Schedule, name: ScheduleName) -> Plan:
    """Set the orders of `schedule`, made for the replica's chain, on the replica's stages.

    Args:
        replica: its place in the plan.
        schedule: programmes of its stages, for its chain of chunks.
        name: kind of the schedule.
    """
    # An order says all that launch counts say, so these go.
    stages = tuple(
        replace(stage, order=order_of(programme), num_launched_forwards=None)
        for stage, programme in zip(plan.replicas[replica].stages, schedule.programmes, strict=True)
    )
    replicas = list(plan.replicas)
    replicas[replica] = replace(replicas[replica], stages=stages)
    return replace(plan, replicas=tuple(replicas), schedule=name)


def check_schedules(plan: Plan, source: str = "") -> None:
    """Prove that every replica of a valid plan can finish.

    Args:
        source: the plan's file, where there is one; messages begin with it.
    Raises:
        PlanFormatError: names the replica and what waits for what.
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
            where = f"{source}: " if source else ""
            raise PlanFormatError(f"{where}replica {r}: {error}") from error
