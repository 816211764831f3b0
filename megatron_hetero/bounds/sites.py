"""The bound by the capacity of the lines between a site and all other sites.

Pipelines with stages on both sides load the lines with activations, and layers that both sides hold
load them with gradients; without either, only one side works.  docs/bound.md has the proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from megatron_hetero.bounds.chains.kinds import GpuClass
from megatron_hetero.cost.choices import context_parallels, recomputes
from megatron_hetero.cost.memory.states import bytes_each_way
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.lines import most_bytes_per_s
from megatron_hetero.cost.parameters import layer_params, matrix_params
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.widths import usable_gpus

MAX_SITES = 8
"""Most sites with a bound; more sites have too many pairs of nodes."""
_PRECISION = 1e-4

Inside = Literal["", "first", "both"]
"""Ends of every replica known to be on the site: neither, the first stage, or both."""


@dataclass(frozen=True)
class Rates:
    """Most layers of a sequence done by GPUs in a second, and the worth of a head in layers."""

    layers_per_s: float
    head_layers: float


def rates_of(
    sizes: Sequence[CostModel], classes: Iterable[GpuClass], most_groups: int = 1
) -> Rates:
    """Return speeds of all GPUs of some classes, in micro-batches of any of the sizes: each at
    its best width, size and recompute; a head counts as on the GPUs on which it is worth least.

    Args:
        most_groups: so many groups may divide a sequence (context parallelism); GPUs then are as
            fast as if they waited for no others.
    """
    vocab_size = sizes[0].workload.model.vocab_size  # unpadded: the least that any plan computes
    layers_per_s, head_layers = 0.0, inf
    # Each class at its best: width, size, recompute, and divided sequences.
    for c in classes:
        layer_s = head_s = inf
        for costs in sizes:
            size = costs.workload.training.micro_batch_size
            for width in c.widths:
                for recompute in recomputes(costs):
                    pieces = costs.variant(recompute=recompute).pieces(c.node, width, vocab_size)
                    layer_s = min(layer_s, width * pieces.layer.total_s / size)
                    head_s = min(head_s, width * pieces.head.total_s / size)
                for context in context_parallels(costs, width, most_groups):
                    # What is recomputed takes longer than what is not.
                    least = "none" if "none" in recomputes(costs) else recomputes(costs)[0]
                    variant = costs.variant(recompute=least)
                    pieces = variant.divided_pieces(c.node, width, context, vocab_size)
                    num_gpus = width * context
                    layer_s = min(layer_s, num_gpus * pieces.layer.total_s / size)
                    head_s = min(head_s, num_gpus * pieces.head.total_s / size)
        # All classes together; the head at its least worth.
        layers_per_s += c.num_gpus / layer_s
        head_layers = min(head_layers, head_s / layer_s)
    return Rates(layers_per_s, head_layers)


@dataclass(frozen=True)
class Sides:
    """A site, and all others: their rates, and what the paths between them carry a second in the
    narrower direction."""

    own_per_s: float
    others_per_s: float
    bytes_per_s: float


class SiteBounds:
    """Of one job; `sizes` are the price lists of the micro-batch sizes that plans may have."""

    def __init__(self, sizes: Sequence[CostModel], classes: Sequence[GpuClass]) -> None:
        self._sizes, self._classes = sizes, classes
        costs = sizes[0]
        model, training = costs.workload.model, costs.workload.training
        self._rates = rates_of(sizes, classes)
        self._num_layers, self._num_sequences = model.num_layers, training.global_batch_size
        # Bytes of a sequence: activations grow with the micro-batch, whose size plans may choose.
        self._bytes = costs.activation_bytes / training.micro_batch_size
        share = even_share(model, 1)
        params, in_matrices = layer_params(model, share), matrix_params(model, share)
        self._layer_bytes = bytes_each_way(training, params, in_matrices)
        self.sites = tuple(dict.fromkeys(n.site for c in classes for n in c.nodes))
        self._sides: dict[str, Sides] = {}

    def least_s(self) -> float:
        """Return seconds that no plan beats; 0 where there are no lines, or too many sites."""
        if not self._says_something:
            return 0.0
        return max(self._least_s(self._of(site), "") for site in self.sites)

    def least_inside_s(self, site: str, has_last: bool) -> float:
        """Return the same for plans with the first stage of every replica on a site, and with
        `has_last` the last stage too."""
        if not self._says_something:
            return 0.0
        return self._least_s(self._of(site), "both" if has_last else "first")

    @property
    def _says_something(self) -> bool:
        return self._sizes[0].cluster.has_lines and 1 < len(self.sites) <= MAX_SITES

    def _least_s(self, sides: Sides, inside: Inside) -> float:
        work = self._num_sequences * (self._num_layers + self._rates.head_layers)
        # Both sides at work all the time: no case is shorter than that.
        all_s = work / (sides.own_per_s + sides.others_per_s)
        # With both ends inside, a replica that leaves the site also comes back.
        crossing = (2 if inside == "both" else 1) * self._bytes
        # docs/bound.md numbers the cases; a plan is under one of them, so the least bound holds for
        # all.
        cases = [
            work / sides.own_per_s,
            max(all_s, self._num_sequences * crossing / sides.bytes_per_s),
            self._mixed_s(sides.own_per_s, sides.others_per_s, sides, crossing, inside, all_s),
        ]
        # First stages on the site leave the other side no replica of its own.
        if not inside:
            cases += [
                work / sides.others_per_s,
                self._mixed_s(sides.others_per_s, sides.own_per_s, sides, crossing, inside, all_s),
                max(all_s, self._num_layers * self._layer_bytes / sides.bytes_per_s),
            ]
        return min(cases)

    def _mixed_s(
        self,
        alone_per_s: float,
        other_per_s: float,
        sides: Sides,
        crossing_bytes: float,
        inside: Inside,
        least_s: float,
    ) -> float:
        """Bound plans with some replicas on one side alone and the rest across: layers held on the
        far side are exchanged, and only the replicas across work there."""
        work = self._num_sequences * (self._num_layers + self._rates.head_layers)
        # With both ends inside, the head is computed on the own side, never across.
        head = 0.0 if inside == "both" else self._rates.head_layers

        # Gradients of the `held` layers on both sides take their room on the lines first.
        def does_enough(step_s: float) -> bool:
            room = step_s * sides.bytes_per_s
            # [held - 1]: bytes left for activations beside those gradients; below 0 nothing
            # crosses.
            left = (room - held * self._layer_bytes for held in range(1, self._num_layers + 1))
            # The most layers of a sequence that the other side does, with the best number of held
            # layers.
            beyond = max(
                (held + head) * min(self._num_sequences, max(0.0, num_bytes / crossing_bytes))
                for held, num_bytes in enumerate(left, 1)
            )
            return alone_per_s * step_s + min(other_per_s * step_s, beyond) >= work

        # At `high` the one side does all work alone, so that the answer is not above it.
        low, high = least_s, work / alone_per_s
        while high - low > _PRECISION * low:
            middle = (low + high) / 2
            low, high = (low, middle) if does_enough(middle) else (middle, high)
        return low

    def _of(self, site: str) -> Sides:
        if site not in self._sides:
            cluster = self._sizes[0].cluster
            parts: tuple[list[GpuClass], list[GpuClass]] = ([], [])
            # Nodes of a class may be on both sides, so that a class becomes two smaller ones.
            for c in self._classes:
                for is_other in (False, True):
                    nodes = [n for n in c.nodes if (n.site != site) is is_other]
                    num_gpus = sum(len(usable_gpus(cluster, n)) for n in nodes)
                    if num_gpus:
                        parts[is_other].append(GpuClass(nodes, c.widths, num_gpus))
            own, others = ([n.name for c in part for n in c.nodes] for part in parts)
            speeds = [
                most_bytes_per_s(cluster, [(a, b) for a in one for b in other])
                for one, other in ((own, others), (others, own))
            ]
            rates = [rates_of(self._sizes, part).layers_per_s for part in parts]
            self._sides[site] = Sides(rates[0], rates[1], min(speeds))
        return self._sides[site]
