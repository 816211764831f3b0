"""Communicators of a plan on a terminal: the most of a GPU, and NCCL's buffers for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from megatron_hetero.cost.sync.communicators import RankCommunicators
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.units import format_bytes

_NAMES = {
    "world": "the whole job",
    "tensor": "tensor parallel",
    "context": "context parallel",
    "stage": "the stage",
    "experts": "experts dealt out",
    "forward": "forward to a neighbour",
    "backward": "backward to a neighbour",
    "losses": "losses",
    "gradients": "gradients",
}


def communicator_lines(plan: Plan, ranks: Sequence[RankCommunicators]) -> Iterator[RenderableType]:
    """Show the rank with the most communicators, and the bytes that NCCL keeps for the rank."""
    # The rank with most communicators; of equal ones the first.
    most = max(ranks, key=lambda rank: (len(rank.uses), rank.num_connections, -rank.rank))
    if not most.uses:
        return
    device = rank_table(plan)[most.rank].device
    counted: Counter[str] = Counter(most.uses)
    uses = ", ".join(
        name if counted[use] == 1 else f"{counted[use]} x {name}"
        for use, name in _NAMES.items()
        if counted[use]
    )
    yield Text.assemble(
        ("Communicators", "bold"),
        f"  up to {len(most.uses)} ({f'rank {most.rank}' if device is None else device}: {uses}); "
        f"NCCL keeps {format_bytes(most.bytes_per_channel)} of buffers for them for each channel "
        "that it opens, about 2 over PCIe and 24 over NVLink; the memory of a plan has them",
    )
    yield Text()
