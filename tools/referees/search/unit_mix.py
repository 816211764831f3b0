"""Replicas with the same layers at each place and unlike GPUs there.

Where the replica with most micro-batches sets the pace of all, and replicas with other layers have
exchanges of their own, GPUs that one shape leaves over may form more replicas of the same layers:
each place takes, of any kind of nodes, the narrowest group that is no slower there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_hetero.planner.columns.packing import pack
from megatron_hetero.planner.columns.pricing import StageTable
from megatron_hetero.planner.completion.fill import FilledChain
from megatron_hetero.planner.problem import Chain, Problem, Unit
from megatron_hetero.planner.shapes.kinds import Kind
from tools.referees.search.shape_layout import Shape

_MAX_COMPOSITIONS = 200
"""Ways to make a replica on a site that are told apart, those of fewest GPUs."""
_ROUNDING = 1e-9

_Gpus = tuple[int, ...]
"""Of each kind."""


@dataclass(frozen=True)
class Mix:
    """Replicas of the same layers: of each shape so many."""

    counts: tuple[tuple[Shape, int], ...]

    @property
    def num_replicas(self) -> int:
        """Of all shapes together."""
        return sum(count for _, count in self.counts)


class UnitMixer:
    """Mixes on the nodes of a problem."""

    def __init__(self, problem: Problem, kinds: Sequence[Kind]) -> None:
        self.problem = problem
        self.kinds = kinds
        self.table = StageTable(problem, kinds)
        self._gpus = tuple(len(kind.nodes) * kind.num_gpus for kind in kinds)

    def most(self, shape: Shape, filled: FilledChain) -> Mix:
        """As many replicas with the layers of `shape`, and no slower stages, as GPUs give.

        Args:
            filled: a replica of the shape.
        """
        ways = self._compositions(shape, filled)
        rows = np.array(list(ways), float).reshape(-1, len(self.kinds)).T
        taken = pack(np.ones(len(ways)), rows, np.array(self._gpus, float)).taken
        counts = [int(number + _ROUNDING) for number in taken]
        left = np.array(self._gpus) - (rows @ counts).astype(int)
        # What rounding down has left over, once more from the one that was cut most.
        order = sorted(range(len(ways)), key=lambda way: (counts[way] - taken[way], way))
        for way in order:
            needed = rows[:, way] > 0
            more = int((left[needed] // rows[needed, way]).min())
            counts[way] += more
            left -= (more * rows[:, way]).astype(int)
        shapes = list(ways.values())
        return Mix(tuple((shapes[way], count) for way, count in enumerate(counts) if count))

    def _compositions(self, shape: Shape, filled: FilledChain) -> Mapping[_Gpus, Shape]:
        """Of each number of GPUs that may be needed, a replica that changes kinds least: the shape
        itself, and those that stay on a site."""
        places = self._options(shape, filled)
        own = [0] * len(self.kinds)
        for kind, width in shape:
            own[kind] += width
        found: dict[_Gpus, Shape] = {tuple(own): shape}
        for site in dict.fromkeys(kind.node.site for kind in self.kinds):
            here = [
                [option for option in options if self.kinds[option[0]].node.site == site]
                for options in places
            ]
            for gpus, made in self._on_site(here).items():
                found.setdefault(gpus, made)
        return found

    def _on_site(self, places: Sequence[Sequence[tuple[int, int]]]) -> Mapping[_Gpus, Shape]:
        found: dict[_Gpus, Shape] = {(0,) * len(self.kinds): ()}
        for options in places:
            longer: dict[_Gpus, Shape] = {}
            for gpus, part in found.items():
                for kind, width in options:
                    more = (*gpus[:kind], gpus[kind] + width, *gpus[kind + 1 :])
                    made = (*part, (kind, width))
                    if more not in longer or _changes(made) < _changes(longer[more]):
                        longer[more] = made
            few = sorted(longer, key=lambda gpus: (sum(gpus), gpus))[:_MAX_COMPOSITIONS]
            found = {gpus: longer[gpus] for gpus in few}
        return found

    def _options(self, shape: Shape, filled: FilledChain) -> list[list[tuple[int, int]]]:
        """Of every place, each kind's narrowest group that holds its layers and is no slower."""
        last = len(shape) - 1
        most_s = max(
            self._time_s(kind, width, i, last, layers)
            for i, ((kind, width), layers) in enumerate(zip(shape, filled.layers, strict=True))
        )
        found = []
        for i, layers in enumerate(filled.layers):
            options = [shape[i]]
            for k, kind in enumerate(self.kinds):
                if k == shape[i][0] or (i == 0 and not kind.may_start):
                    continue
                if i == last and not kind.may_end:
                    continue
                for width in kind.widths:
                    holds = self.table.max_layers(k, width, i == 0, i == last, last + 1 - i)
                    if holds >= layers and self._time_s(k, width, i, last, layers) <= most_s:
                        options.append((k, width))
                        break
            found.append(options)
        return found

    def _time_s(self, kind: int, width: int, i: int, last: int, layers: int) -> float:
        embedding_s, layer_s, head_s = self.table.times_s(kind, width)
        return layers * layer_s + (embedding_s if i == 0 else 0.0) + (head_s if i == last else 0.0)

    def chains(self, mix: Mix) -> list[Chain]:
        """Its replicas on nodes, wide groups first; empty if they do not fit on whole nodes."""
        shapes = [shape for shape, count in mix.counts for _ in range(count)]
        wanted = [
            (-width, i, r, kind)
            for r, shape in enumerate(shapes)
            for i, (kind, width) in enumerate(shape)
        ]
        taken = [[0] * len(kind.nodes) for kind in self.kinds]
        units: dict[tuple[int, int], Unit] = {}
        for negative, i, r, kind in sorted(wanted):
            width, of_kind = -negative, taken[kind]
            most = self.kinds[kind].num_gpus - width
            node = next((n for n, number in enumerate(of_kind) if number <= most), None)
            if node is None:
                return []
            name = self.kinds[kind].nodes[node].name
            units[r, i] = Unit(name, self.problem.gpus[name][of_kind[node] : of_kind[node] + width])
            of_kind[node] += width
        return [tuple(units[r, i] for i in range(len(shape))) for r, shape in enumerate(shapes)]


def _changes(shape: Shape) -> tuple[int, Shape]:
    """How often it goes from one kind to another."""
    kinds = [kind for kind, _ in shape]
    return sum(a != b for a, b in pairwise(kinds)), shape
