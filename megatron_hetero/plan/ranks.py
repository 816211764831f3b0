"""The place of every global rank in the plan: the binding of processes to GPUs.

`torchrun` numbers processes host by host, in `--node-rank` order and, inside a host, by local rank.
`Plan.hosts` holds both orders, so global rank r is the r-th (host, GPU) pair.  A plan made from a
bare layout has no hosts: its ranks follow the layout (replica, then stage, then tensor rank).
"""

from __future__ import annotations

from megatron_hetero.hashed import value
from megatron_hetero.plan.plan import Layout, Plan


@value(frozen=True)
class Position:
    """A place in the plan: `stages[stage]` of `replicas[replica]`, tensor-parallel `tensor_rank`
    of the group of `context_rank`.

    `device` ("machine:index") is None when the plan names no devices.
    """

    replica: int
    stage: int
    tensor_rank: int
    device: str | None = None
    context_rank: int = 0


def positions(layout: Layout) -> tuple[Position, ...]:
    """Return every place of a layout in reading order: replica, stage, context rank, tensor
    rank."""
    return tuple(
        Position(r, s, i % stage.tensor_parallel, None, i // stage.tensor_parallel)
        for r, replica in enumerate(layout.replicas)
        for s, stage in enumerate(replica.stages)
        for i in range(stage.num_devices)
    )


def rank_table(plan: Plan) -> tuple[Position, ...]:
    """Return the place of every global rank, indexed by rank.

    `plan` has passed `validate_plan`: its devices are each in one stage and on one host.
    """
    # A bare layout has no hosts: ranks follow its reading order.
    if not plan.hosts:
        return positions(plan.layout)
    place_of_device = device_places(plan)
    # Global ranks follow the hosts, as torchrun numbers processes.
    return tuple(
        place_of_device[f"{host.node}:{index}"] for host in plan.hosts for index in host.gpu_indices
    )


def device_places(plan: Plan) -> dict[str, Position]:
    """Return the place of every device that a plan names in a stage, also where an edit has left a
    stage too few or too many of them."""
    # A stage's devices come group by group, tensor-parallel rank fastest.
    return {
        device: Position(
            r, s, i % stage.shape.tensor_parallel, device, i // stage.shape.tensor_parallel
        )
        for r, replica in enumerate(plan.replicas)
        for s, stage in enumerate(replica.stages)
        for i, device in enumerate(stage.devices)
    }


def place_name(place: Position, layout: Layout) -> str:
    """Return a place of a layout in words, with its context rank where its stage has several."""
    shape = layout.replicas[place.replica].stages[place.stage]
    context = f", context rank {place.context_rank}" if shape.context_parallel > 1 else ""
    return f"replica {place.replica}, stage {place.stage}, tensor rank {place.tensor_rank}{context}"


def rank_names(plan: Plan) -> list[str]:
    """Return [rank] -> its place in words."""
    return [
        f"replica {place.replica}, stage {place.stage}"
        + (f", {place.device}" if place.device else "")
        for place in rank_table(plan)
    ]


def rank_machines(plan: Plan) -> list[str]:
    """Return the machine of each rank, in a plan that has devices on all ranks."""
    return [str(place.device).rpartition(":")[0] for place in rank_table(plan)]
