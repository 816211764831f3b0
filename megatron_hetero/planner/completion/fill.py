"""From chains of units (tensor-parallel groups) to a placement: layers and micro-batches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap

from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.division.layers import split_layers
from megatron_hetero.planner.division.micro_batches import share_micro_batches
from megatron_hetero.planner.problem import Chain, Problem, Unit

Piece = tuple[Unit, int]
"""A stage: its GPUs and its number of layers."""
Pipeline = tuple[Piece, ...]


@dataclass(frozen=True)
class FilledChain:
    """Layers of a chain, and its quick times: the first micro-batch, and each further one."""

    layers: tuple[int, ...]
    fill_s: float
    period_s: float
    fits: bool

    def quick_time_s(self, num_micro_batches: float) -> float:
        """Estimate the pipeline's time for that many micro-batches."""
        return self.fill_s + (num_micro_batches - 1) * self.period_s


class Filler:
    """Fills chains with layers; remembers what it has filled, by what stands where."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._chains: dict[Hashable, FilledChain] = {}

    def chain(
        self,
        chain: Chain,
        vocab_rows: int,
        max_in_flight: int,
        most: tuple[int, ...] | None = None,
        num_replicas: int = 1,
    ) -> FilledChain:
        """Return minimax layers within memory; where nothing fits, the split that lacks least
        memory.

        Args:
            most: layers that a stage may have beside what its memory says, shape [stage].
            num_replicas: among which the distributed optimizer divides its states.
        """
        key = (self.shape(chain), vocab_rows, max_in_flight, most, num_replicas)
        if key not in self._chains:
            self._chains[key] = self._fill(chain, vocab_rows, max_in_flight, most, num_replicas)
        return self._chains[key]

    def shape(self, chain: Chain) -> Hashable:
        """Return equal for chains that are filled alike."""
        like = self.problem.likeness
        stages = tuple([(like.node(unit.node), unit.width) for unit in chain])
        return stages, tuple(starmap(like.hop, pairwise([unit.node for unit in chain])))

    def placement(self, chains: Sequence[Chain]) -> Placement | None:
        """Return layers for every chain, micro-batches in proportion to speed; None if a chain
        is not allowed or there are too few micro-batches."""
        problem = self.problem
        if not all(problem.chain_is_allowed(chain) for chain in chains):
            return None
        rows = problem.costs.vocab_rows(sorted({u.width for chain in chains for u in chain}))
        # Every other replica has one micro-batch at least.
        most = problem.num_micro_batches - len(chains) + 1
        filled = [self.chain(chain, rows, most, num_replicas=len(chains)) for chain in chains]
        return filled_placement(problem, chains, filled)

    def _fill(
        self,
        chain: Chain,
        vocab_rows: int,
        max_in_flight: int,
        most: tuple[int, ...] | None,
        num_replicas: int,
    ) -> FilledChain:
        problem, costs = self.problem, self.problem.costs.sharded_among(num_replicas)
        nodes = problem.cluster.node_by_name
        num_stages, last = len(chain), len(chain) - 1
        # Times and memory of each stage, as functions of its layers.
        pieces = [costs.pieces(nodes[u.node], u.width, vocab_rows) for u in chain]
        memories = [
            costs.memory(
                nodes[u.node],
                u.width,
                i == 0,
                i == last,
                min(num_stages - i, max_in_flight),
                vocab_rows,
            )
            for i, u in enumerate(chain)
        ]
        groups = [u.devices for u in chain]
        loads_s = costs.send_loads_s(groups)
        # Seconds without layers: the ends, and sends that the stage's GPUs wait for.
        base = [p.stage(0, i == 0, i == last).total_s + loads_s[i] for i, p in enumerate(pieces)]
        per_layer = [p.layer.total_s for p in pieces]
        # [stage]: most layers by memory.
        caps = [m.max_layers for m in memories]
        # Split the layers within memory.
        if most is not None:
            caps = [min(pair) for pair in zip(caps, most, strict=True)]
        layers = split_layers(problem.num_layers, per_layer, base, caps)
        fits = layers is not None
        # Nothing fits: then split what is missing, so that the nearest miss is known.
        if layers is None:
            missing = [float(m.peak_bytes(0) - m.capacity_bytes) for m in memories]
            added = [float(m.bytes_per_layer) for m in memories]
            layers = split_layers(
                problem.num_layers, added, missing, [problem.num_layers] * num_stages
            )
        if layers is None:
            raise ValueError(f"{num_stages} stages for {problem.num_layers} layers")
        # Quick seconds of the filled pipeline.
        times = [b + n * t for b, n, t in zip(base, layers, per_layer, strict=True)]
        fill_s, period_s = costs.quick_times_s(times, groups)
        return FilledChain(layers, fill_s, period_s, fits)


def filled_placement(
    problem: Problem, chains: Sequence[Chain], filled: Sequence[FilledChain]
) -> Placement | None:
    """Return filled chains with their micro-batches in proportion to speed; None if there are too
    few."""
    shares = share_micro_batches(
        problem.num_micro_batches, [f.fill_s for f in filled], [f.period_s for f in filled]
    )
    if shares is None:
        return None
    return Placement(
        tuple(
            placed_replica(chain, f.layers, share)
            for chain, f, share in zip(chains, filled, shares, strict=True)
        )
    )


def with_micro_batches(problem: Problem, pipelines: Sequence[Pipeline]) -> Placement | None:
    """Return `filled_placement` of pipelines with given layers, without a check of memory; None if
    the limits or the batch forbid the pipelines."""
    chains = [tuple(unit for unit, _ in pipeline) for pipeline in pipelines]
    if len(chains) not in problem.replica_counts():
        return None
    if not all(problem.chain_is_allowed(chain) for chain in chains):
        return None
    costs, nodes = problem.costs, problem.cluster.node_by_name
    rows = costs.vocab_rows(sorted({unit.width for chain in chains for unit in chain}))
    filled = []
    for pipeline, chain in zip(pipelines, chains, strict=True):
        last = len(pipeline) - 1
        groups = [u.devices for u in chain]
        loads_s = costs.send_loads_s(groups)
        times = [
            costs.pieces(nodes[u.node], u.width, rows).stage(n, i == 0, i == last).total_s + load_s
            for i, ((u, n), load_s) in enumerate(zip(pipeline, loads_s, strict=True))
        ]
        layers = tuple(n for _, n in pipeline)
        # Memory is the caller's concern: all of them count as fitting.
        filled.append(FilledChain(layers, *costs.quick_times_s(times, groups), fits=True))
    return filled_placement(problem, chains, filled)


def placed_replica(chain: Chain, layers: Sequence[int], num_micro_batches: int) -> PlacedReplica:
    """Return a replica from its parts."""
    return PlacedReplica(
        tuple(PlacedStage(u.devices, n) for u, n in zip(chain, layers, strict=True)),
        num_micro_batches,
    )
