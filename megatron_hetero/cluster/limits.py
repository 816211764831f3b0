"""What the user limits or fixes in every plan."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.cluster.makers import Library

CHOICES = (
    "micro_batch_size",
    "recompute",
    "shares",
    "schedule",
    "optimizer_share",
    "precision",
    "exchange",
    "context_parallel",
)
"""Settings that a plan may make for single stages or replicas, beside or against the job's flags;
the precision for all of them, where the job names none, and groups of machines for the exchange of
gradients."""


@dataclass(frozen=True)
class Limits:
    """Constraints and fixed choices of the user; every strategy of the planner keeps to them."""

    max_tensor_parallel: int | None = None
    max_pipeline_parallel: int | None = None
    num_replicas: int | None = None
    idle_devices: tuple[str, ...] = ()
    """Devices ("machine:index") or whole machines that stay unused."""
    first_stage_nodes: tuple[str, ...] = ()
    """Nodes on which every replica's first stage must be (empty: anywhere)."""
    last_stage_nodes: tuple[str, ...] = ()
    no_tensor_parallel_across: tuple[str, ...] = ("nodes",)
    """Classes ("nodes", "sites") or node names inside which TP is forbidden.  A class forbids TP
    groups that span two nodes (sites); a node name forbids TP wider than 1 on that node."""
    no_data_parallel_across_sites: bool = False
    max_price_per_hour: float | None = None
    as_given: tuple[str, ...] = ()
    """Names of `CHOICES`: what every stage does as the job's flags say, not as the search finds."""
    library: Library | None = None
    """GPUs with another communication library stay unused."""
    memory_reserve_bytes: int | None = None
    """Kept free on every device for CUDA, libraries and fragments; None: what these are predicted
    to take, and a margin (`cost.memory.libraries`)."""
