"""Seconds of the gradient exchange between replicas, and between the stages of a tied embedding.

The planner's quick form of what `schedule.exchange.gradients` makes and the runtime does.  Every
run of layers with the same holders is one exchange: an all-reduce in a ring, or, with the
distributed optimizer, every part straight to its owner, and after the update the new weights in
rings; or, where the plan names groups of machines, group by group (`exchange.groups.by_group`).
It begins when its last holder's backward passes are done (with `--overlap-grad-reduce` a first
stage begins within its last one), and takes each of its paths in turn with all others that cross
it; a port of a stage inside its node is a path too.  With `--overlap-param-gather` new weights
travel during the first forward passes, each until its layer's turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from types import MappingProxyType

import numpy as np

from megatron_hetero.cluster.node_links import NodePair
from megatron_hetero.cost.network.holder_flow import Flow, Ints
from megatron_hetero.cost.parameters import layer_params
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync.buckets import StageId
from megatron_hetero.cost.sync.exchange_clock import ExchangeStep, last_end_s, num_buckets
from megatron_hetero.cost.sync.groups import buffers_of
from megatron_hetero.cost.sync.room import EarlyRoom, least_rooms
from megatron_hetero.cost.sync.runs import ExchangeRun, ExchangeRuns
from megatron_hetero.hashed import value


@value(frozen=True)
class StageEnd:
    """The end of a stage's last backward pass, and the seconds of the pass during which complete
    gradients are exchanged (0: all after the pass)."""

    end_s: float
    backward_s: float = 0.0


@value(frozen=True)
class FirstForward:
    """The first forward pass of a stage: its begin, seconds after that of the step, and its
    seconds."""

    start_s: float
    forward_s: float


@value(frozen=True)
class Carried:
    """Seconds for which an exchange takes paths between nodes, and the shared lines."""

    pairs: Mapping[NodePair, float]
    lines: Mapping[str, float]

    @property
    def busiest_s(self) -> float:
        """Return the seconds of the busiest path or line."""
        return max((*self.pairs.values(), *self.lines.values()), default=0.0)


NOTHING = Carried({}, {})
NO_LIMIT: Mapping[StageId, int] = MappingProxyType({})
"""No limit on the buckets under way."""


class GradientExchangePrices(ExchangeRuns):
    """Seconds of a job's exchanges on a cluster, from the priced runs of its placements."""

    def _timed(
        self, placement: Placement, vocab_rows: int, rooms: Mapping[StageId, int] = NO_LIMIT
    ) -> Iterator[tuple[ExchangeRun, dict[StageId, float]]]:
        """Yield `groups`, each with the parts of rooms that a bucket takes, by waiting stage; empty
        where it needs none."""
        witnesses, runs = self._runs_of(placement, vocab_rows)
        least = least_rooms(rooms, witnesses)
        is_divided = self._weight_bytes is not None
        for run in runs:
            yield run, buffers_of(
                placement,
                {holder: least[holder] for holder in run.waiting if holder in least},
                run.prices.num_rank_sets,
                run.rank_bytes,
                is_packed=is_divided,
                is_received=is_divided or run.prices.is_by_groups,
            )

    def exposed_s(
        self,
        placement: Placement,
        vocab_rows: int,
        ends: Sequence[StageEnd],
        pipelines_s: float,
        carried: Carried = NOTHING,
        rooms: Mapping[StageId, int] = NO_LIMIT,
        forwards: Sequence[FirstForward] = (),
    ) -> float:
        """Return the seconds from the end of all pipelines to the last reduced gradient, plus those
        for which new weights are waited for.

        Args:
            ends: of every stage, in the layout's order.
            carried: what boundaries take of the paths meanwhile.
            rooms: bytes for buckets under way (`cost.sync.room`), by stage; without, for all.
            forwards: of every stage, where new weights travel meanwhile; without, they are waited
                for after the update.
        """
        # When each stage is done with each of its layers.
        firsts = np.array([n for replica in placement.replicas for n in replica.first_layers])
        placed = [stage for replica in placement.replicas for stage in replica.stages]
        layer_s = np.array([e.backward_s / s.num_layers for e, s in zip(ends, placed, strict=True)])
        end_s = np.array([end.end_s for end in ends])
        overlaps = bool(layer_s.any())

        def ready_s(places: Ints, layer: int) -> float:
            """Return when all holders have the gradients down to `layer`."""
            ready = end_s[places] - layer_s[places] * (layer - firsts[places])
            return float(ready.max())

        # First and last bucket of each run are ready when all holders have their layers, or, where
        # there is no room within the passes, after these.
        steps: list[ExchangeStep] = []
        gathers: list[ExchangeStep] = []
        room = EarlyRoom()
        for timed, buffers in self._timed(placement, vocab_rows, rooms):
            group, places = timed.group, timed.places
            common = timed.bucket_share, buffers
            # Layers of the run, of which backward finishes the deepest first.
            end = group.first_layer + group.num_layers
            first = max(group.first_layer, end - ceil(timed.bucket_share * group.num_layers))
            # After the passes unless the buckets find room within them.
            last_s = first_s = float(end_s[places].max())
            if overlaps:
                number = num_buckets(timed.bucket_share)
                num_early = room.take(buffers, number)
                first_s = ready_s(places, first) if num_early else first_s
                last_s = ready_s(places, group.first_layer) if num_early == number else last_s
            steps.append(ExchangeStep(timed.waiting, timed.gradients, first_s, last_s, *common))
            if timed.weights is not None and forwards:
                gathers += _during_forwards(timed, timed.weights, placed, firsts, forwards)
            elif timed.weights is not None:
                gathers.append(ExchangeStep(timed.waiting, timed.weights, 0.0, 0.0, *common))
        # Exchanges queue on the paths that boundaries have loaded.
        taken = self._flows.numbered(carried.pairs, carried.lines)
        reduced_s = max(0.0, last_end_s(steps, taken) - pipelines_s)
        # New weights are gathered after the update, when no boundary is on the paths, or in the
        # order of the forward pass; messages of first passes are small beside them.
        gathers.sort(key=lambda step: step.due_s)
        return reduced_s + max(0.0, last_end_s(gathers))

    def alone_s(
        self, placement: Placement, vocab_rows: int, rooms: Mapping[StageId, int] = NO_LIMIT
    ) -> float:
        """Return the seconds of the exchange by itself, all stages ready at once, in `rooms`."""
        ends = [StageEnd(0.0) for replica in placement.replicas for _ in replica.stages]
        return self.exposed_s(placement, vocab_rows, ends, 0.0, rooms=rooms)

    def path_seconds(self, placement: Placement, vocab_rows: int) -> dict[tuple[str, str], float]:
        """Return the seconds for which the exchanges of a step occupy each path between two
        nodes."""
        found: dict[tuple[str, str], float] = {}
        # Numbers of paths below the square of the nodes are pairs of nodes (`HolderFlows`).
        names = list(self._flows.node_number)
        flows = [
            (flow, 1)
            for timed in self.groups(placement, vocab_rows)
            for flow in (timed.gradients, timed.weights)
            if flow is not None
        ]
        for flow, times in (*flows, *self._sharded(placement)):
            for path, seconds in zip(flow.paths.tolist(), flow.seconds.tolist(), strict=True):
                if path < len(names) ** 2:
                    here, there = divmod(path, len(names))
                    nodes = names[here], names[there]
                    found[nodes] = found.get(nodes, 0.0) + times * seconds
        return found

    def _sharded(self, placement: Placement) -> Iterator[tuple[Flow, int]]:
        """Yield the flows of sharded layers, and how often a step has each."""
        size = layer_params(self._model, even_share(self._model, 1))
        first = placement.replicas[0]
        for s, stage in enumerate(first.stages):
            if stage.sharding is None:
                continue
            gradients, weights = self.layer_flows([r.stages[s] for r in placement.replicas], size)
            # Each round reduces gradients once, and gathers weights for either pass.
            yield gradients, stage.num_sharded_layers * first.num_rounds
            yield weights, 2 * stage.num_sharded_layers * first.num_rounds


def _during_forwards(
    run: ExchangeRun,
    weights: Flow,
    placed: Sequence[PlacedStage],
    firsts: Ints,
    forwards: Sequence[FirstForward],
) -> Iterator[ExchangeStep]:
    """Yield the first bucket of a run's new weights, and all others, each due when the first of its
    holders comes to the bucket's layers.

    Args:
        placed: all stages, in the layout's order; `firsts` are their first layers.
    """

    def due_s(layer: float) -> float:
        """Return when the first holder comes to `layer`."""
        found: list[float] = []
        for place in run.places.tolist():
            # Embeddings come before all layers, what follows the layers after them.
            part = (layer - int(firsts[place])) / placed[place].num_layers
            own, part = forwards[place], min(max(part, 0.0), 1.0)
            found.append(own.start_s + part * own.forward_s)
        return min(found)

    first, num_layers, share = run.group.first_layer, run.group.num_layers, run.bucket_share
    number = num_buckets(share)
    one = weights if number == 1 else _part_of(weights, share)
    yield ExchangeStep(run.waiting, one, 0.0, 0.0, due_s=due_s(first))
    if number > 1:
        # Waits grow or shrink evenly along the buckets, so the first and the last one tell them.
        rest, last = _part_of(weights, 1 - share), first + int((number - 1) * share * num_layers)
        own = share / (1 - share)
        yield ExchangeStep(run.waiting, rest, 0.0, 0.0, min(1.0, own), due_s=due_s(last))


def _part_of(flow: Flow, share: float) -> Flow:
    """Return the flow of so much of a buffer."""
    return Flow(flow.paths, share * flow.seconds, flow.latency_s)
