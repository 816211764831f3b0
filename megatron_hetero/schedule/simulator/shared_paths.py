"""Replicas that share a path between nodes, priced by simulation.

The cost model times each pipeline as if its messages had the network to themselves, and adds only
that a path carries all of them (`PlacementCost.card_s`).  Where messages of several boundaries take
one path, or paths over one line, they also wait for each other, and 1F1B waits with them: what that
costs depends on when each comes, so those pipelines are run together, event by event, first come
first served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.cost.step_cost import PlacementCost, ReplicaCost
from megatron_hetero.schedule.network import crossing, path_names
from megatron_hetero.schedule.simulator.crowd import OneFOneB, crowd_ends_s

MAX_MESSAGES = 200_000
"""Most messages a step of unlike pipelines to be simulated (about 7 s); above, a placement keeps
the cost model's times, which may be far too short where paths are crowded."""


def queued(
    costs: CostModel, placement: Placement, cost: PlacementCost, *, is_stock: bool = False
) -> PlacementCost:
    """Simulate pipelines with shared paths, and replace the cost model's times of these.

    Where stages wait for their sends, which the cost model does not know, all pipelines are
    simulated.

    Args:
        is_stock: stock Megatron runs the placement.
    """
    # Crowds of replicas that wait for each other; identical crowds run once.
    waits = is_stock or costs.workload.training.waits_for_receivers
    unlike = _unlike_crowds(costs.cluster, placement, cost, waits)
    if not unlike or _num_messages_of(placement, unlike) > MAX_MESSAGES:
        return cost
    costs = costs.sharded_as(placement)
    # Simulate one crowd of each kind and give its times to all.
    replicas = list(cost.replicas)
    for crowds in unlike:
        known = _run_together(
            costs, [(placement.replicas[r], cost.replicas[r]) for r in crowds[0]], is_stock
        )
        for crowd in crowds:
            for r, found in zip(crowd, known, strict=True):
                replicas[r] = found
    return costs.combine(placement, tuple(replicas), costs.vocab_rows(placement.widths))


def num_simulated(
    cluster: Cluster, placement: Placement, cost: PlacementCost, *, waits: bool = False
) -> int:
    """Count the messages of the pipelines that `queued` has to simulate; those that run alike count
    once.

    Args:
        cost: the price of the placement, by the cost model alone.
        waits: stages wait for their sends.
    """
    return _num_messages_of(placement, _unlike_crowds(cluster, placement, cost, waits))


def _num_messages_of(placement: Placement, unlike: Sequence[Sequence[Sequence[int]]]) -> int:
    return sum(num_messages(placement, crowds[0]) for crowds in unlike)


def _unlike_crowds(
    cluster: Cluster, placement: Placement, cost: PlacementCost, waits: bool
) -> list[list[list[int]]]:
    """Group replicas into crowds, by waits for one another, and identical crowds into lists."""
    paths = [_paths(cluster, replica) for replica in placement.replicas]
    # Waiting senders slow a pipeline even where it has its paths to itself.
    sharing = range(len(paths)) if waits else _sharing(paths)
    # Crowds that run alike, by their likeness.
    alike: dict[Hashable, list[list[int]]] = {}
    for crowd in _crowds(paths, sharing):
        alike.setdefault(_likeness(placement, cost, paths, crowd), []).append(crowd)
    return list(alike.values())


def _run_together(
    costs: CostModel, crowd: Sequence[tuple[PlacedReplica, ReplicaCost]], is_stock: bool
) -> list[ReplicaCost]:
    together = crowd_ends_s([_pipeline(costs, *priced, is_stock) for priced in crowd])
    found = []
    for (_, alone), until_s in zip(crowd, together, strict=True):
        # Rounding apart, nothing is faster for having to wait.
        ends_s = tuple(map(max, alone.ends_s, until_s))
        found.append(replace(alone, pipeline_s=max(ends_s), ends_s=ends_s))
    return found


def _crowds(paths: Sequence[_Paths], sharing: Sequence[int]) -> list[list[int]]:
    """Group replicas into crowds, by waits for one another, directly or through further replicas;
    crowds share no path."""
    # Union-find: replicas that take a path have one leader.
    lead = {r: r for r in sharing}

    def leader(r: int) -> int:
        while lead[r] != r:
            # Follow leaders up to one that leads itself.
            r = lead[r]
        return r

    # The first replica on a path leads all later ones on it.
    first: dict[str, int] = {}
    for r in sharing:
        for path in chain.from_iterable(paths[r]):
            lead[leader(r)] = leader(first.setdefault(path, r))
    # Collect by leader.
    crowds: dict[int, list[int]] = {}
    for r in sharing:
        crowds.setdefault(leader(r), []).append(r)
    return list(crowds.values())


def _likeness(
    placement: Placement, cost: PlacementCost, paths: Sequence[_Paths], crowd: Sequence[int]
) -> Hashable:
    """Return a key, equal for identical crowds whatever the names of nodes and paths."""
    # Nodes and paths are numbered as they come up, so that names do not matter.
    names: dict[str, int] = {}
    return tuple(
        (
            id(cost.replicas[r]),  # equal replicas are priced once
            placement.replicas[r].num_micro_batches,
            placement.replicas[r].num_in_flight,
            tuple(
                names.setdefault(stage.devices[0].node, len(names))
                for stage in placement.replicas[r].stages
            ),
            tuple([names.setdefault(path, len(names)) for path in chain.from_iterable(paths[r])]),
        )
        for r in crowd
    )


def sharing_replicas(cluster: Cluster, placement: Placement) -> tuple[int, ...]:
    """Find replicas with a message on a path or line that messages of another boundary take in the
    same direction."""
    return _sharing([_paths(cluster, replica) for replica in placement.replicas])


def _sharing(paths: Sequence[_Paths]) -> tuple[int, ...]:
    # [replica] -> its paths; one taken twice is shared, by replicas or by one replica's boundaries.
    taken = [list(chain.from_iterable(hops)) for hops in paths]
    used = Counter(chain.from_iterable(taken))
    return tuple([r for r, own in enumerate(taken) if any(used[path] > 1 for path in own)])


def num_messages(placement: Placement, replicas: Sequence[int]) -> int:
    """Count the activations and gradients that cross boundaries of some replicas in a step."""
    chosen = [placement.replicas[r] for r in replicas]
    return sum(2 * (len(r.stages) - 1) * r.num_micro_batches for r in chosen)


_Paths = Sequence[Sequence[str]]
"""Names of the paths of a replica's messages between nodes, for each boundary and direction."""


def _paths(cluster: Cluster, replica: PlacedReplica) -> _Paths:
    # Only boundaries between nodes, first all forward, then all backward.
    ends = pairwise([stage.devices for stage in replica.stages])
    hops = [(a, b) for a, b in ends if a[0].node != b[0].node]
    return [path_names(cluster, a, b) for a, b in hops + [(b, a) for a, b in hops]]


def _pipeline(
    costs: CostModel, replica: PlacedReplica, cost: ReplicaCost, is_stock: bool
) -> OneFOneB:
    costs = costs.variant(micro_batch_size=replica.micro_batch_size)
    # Passes as priced; messages by who runs the pipeline.
    hops = list(pairwise(replica.stages))
    waits = costs.workload.training.waits_for_receivers
    return OneFOneB(
        replica.num_in_flight,
        replica.num_micro_batches,
        tuple(s.times.forward_s for s in cost.stages),
        tuple(s.times.backward_s for s in cost.stages),
        tuple(crossing(costs, here, there, is_stock) for here, there in hops),
        tuple(crossing(costs, there, here, is_stock) for here, there in hops),
        "waited" if is_stock else "rendezvous" if waits else "buffered",
    )
