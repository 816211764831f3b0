"""A lower bound on the step time of every plan of the space, by the same cost model.

A step of T seconds is impossible if the GPUs can be given prices such that every replica costs at
least as much as the micro-batches that it can do in T, while all GPUs together cost less than the
micro-batches there are (the dual of choosing replicas in fractions).  `bound_chains` finds the
cheapest replica for any number of micro-batches, a linear programme better prices, and bisection
the longest step that is proved impossible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from megatron_hetero.cluster.spec import Node
from megatron_hetero.cost.bound_chains import ChainPricer, CheapestChain, StageOption
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.widths import usable_gpus

BOUND_RELAXES = (
    "whole replicas and which GPUs share a node, stage boundaries, gradient exchange, update"
)
WORK_BOUND_RELAXES = (
    "memory, whole layers and micro-batches, pipeline fill, stage boundaries, gradient exchange, "
    "update"
)

_MAX_GPUS = 128
"""Larger clusters are bounded by their work alone."""
_MAX_LAYER_OPTIONS = 4000
"""The same, by layers times the ways to hold them."""
_LONGEST = 2.0
"""The bound is looked for up to this many times the bound by work."""
_PRECISION = 0.01
_MAX_ROUNDS = 6
_NARROW = 1.01
"""Numbers of micro-batches this near to each other are taken together."""


@dataclass(frozen=True)
class Bound:
    """No plan of the space takes less than `step_time_s`; `relaxes` says what it leaves out."""

    step_time_s: float
    relaxes: str


def step_time_bound_s(costs: CostModel) -> float:
    """Seconds that no placement of the space beats; see `step_time_bound`."""
    return step_time_bound(costs).step_time_s


def step_time_bound(costs: CostModel) -> Bound:
    """The best bound known: that of the work, made longer as far as prices prove it."""
    classes = _classes(costs)
    work_s = _work_bound_s(costs, classes)
    num_gpus = sum(c.num_gpus for c in classes)
    options = [option for index, c in enumerate(classes) for option in _options(costs, c, index)]
    num_layers = costs.workload.model.num_layers
    too_large = num_gpus > _MAX_GPUS or num_layers * len(options) > _MAX_LAYER_OPTIONS
    if not options or too_large:
        return Bound(work_s, WORK_BOUND_RELAXES)
    training = costs.workload.training
    prover = _Prover(
        ChainPricer(options, num_layers),
        [c.num_gpus for c in classes],
        training.global_batch_size // training.micro_batch_size,
    )
    low_s, high_s = work_s, _LONGEST * work_s
    while high_s > (1 + _PRECISION) * low_s:
        middle_s = (low_s * high_s) ** 0.5
        if prover.is_impossible(middle_s):
            low_s = middle_s
        else:
            high_s = middle_s
    return Bound(low_s, BOUND_RELAXES)


@dataclass
class _Class:
    """GPUs that are alike wherever they are, but for who their neighbours are."""

    node: Node
    widths: tuple[int, ...]
    num_gpus: int


def _classes(costs: CostModel) -> list[_Class]:
    found: dict[tuple[object, ...], _Class] = {}
    for node in sorted(costs.cluster.nodes, key=lambda node: node.name):
        num_gpus = len(usable_gpus(costs.cluster, node))
        widths = tuple(w for w in costs.widths(node) if w <= num_gpus)
        if not widths:
            continue
        key = (node.gpu_type.name, node.gpu_type.memory_bytes, node.link, widths)
        if key in found:
            found[key].num_gpus += num_gpus
        else:
            found[key] = _Class(node, widths, num_gpus)
    return list(found.values())


def _work_bound_s(costs: CostModel, classes: Sequence[_Class]) -> float:
    """All work, perfectly divided over all GPUs.

    A device that spends all of a step of T seconds on layers completes at most T / y of them, y
    being its GPU-seconds for one layer at the best width.  A head costs at least `ratio` layers on
    any device, so num_micro_batches * (num_layers + ratio) <= sum T / y.  A step also lasts at
    least one micro-batch's way through the model on the fastest stages.
    """
    layers_per_s = 0.0
    ratio = fastest_layer_s = fastest_head_s = inf
    for c in classes:
        # The unpadded vocabulary is the least that any plan computes.
        vocab_size = costs.workload.model.vocab_size
        pieces = {w: costs.pieces(c.node, w, vocab_size) for w in c.widths}
        gpu_seconds = min(w * p.layer.total_s for w, p in pieces.items())
        head_gpu_seconds = min(w * p.head.total_s for w, p in pieces.items())
        layers_per_s += c.num_gpus / gpu_seconds
        ratio = min(ratio, head_gpu_seconds / gpu_seconds)
        fastest_layer_s = min([fastest_layer_s, *(p.layer.total_s for p in pieces.values())])
        fastest_head_s = min([fastest_head_s, *(p.head.total_s for p in pieces.values())])
    if not layers_per_s:
        return 0.0
    training, num_layers = costs.workload.training, costs.workload.model.num_layers
    num_micro_batches = training.global_batch_size // training.micro_batch_size
    work_s = num_micro_batches * (num_layers + ratio) / layers_per_s
    return max(work_s, num_layers * fastest_layer_s + fastest_head_s)


def _options(costs: CostModel, gpu_class: _Class, index: int) -> list[StageOption]:
    model, training = costs.workload.model, costs.workload.training
    num_micro_batches = training.global_batch_size // training.micro_batch_size
    most_in_flight = min(num_micro_batches, model.num_layers)
    options = []
    for width in gpu_class.widths:
        pieces = costs.pieces(gpu_class.node, width, model.vocab_size)
        rows = []
        for in_flight in range(1, most_in_flight + 1):
            ends = []
            for first, last in ((False, False), (False, True), (True, False), (True, True)):
                most = model.num_layers
                if not training.use_distributed_optimizer:  # its memory depends on all replicas
                    memory = costs.memory(
                        gpu_class.node, width, first, last, in_flight, model.vocab_size
                    )
                    most = max(0, min(memory.max_layers, most))
                ends.append(most)
            rows.append((ends[0], ends[1], ends[2], ends[3]))
        option = StageOption(
            index,
            width,
            pieces.embedding.total_s,
            pieces.layer.total_s,
            pieces.head.total_s,
            tuple(rows),
        )
        if max(rows[0]) > 0:
            options.append(option)
    return options


class _Prover:
    """Looks for prices that prove a step time impossible; keeps the last ones to start from."""

    def __init__(
        self, pricer: ChainPricer, num_gpus: Sequence[int], num_micro_batches: int
    ) -> None:
        self.pricer = pricer
        self.num_gpus = num_gpus
        self.num_micro_batches = num_micro_batches
        speeds = [0.0] * len(num_gpus)
        for option in pricer.options:
            speed = 1 / (option.width * option.layer_s)
            speeds[option.gpu_class] = max(speeds[option.gpu_class], speed)
        self.prices = self._scaled(speeds)

    def is_impossible(self, step_s: float) -> bool:
        """Whether prices were found that prove it."""
        rows: list[tuple[int, CheapestChain]] = []
        for _ in range(_MAX_ROUNDS):
            bargain = self._bargain(step_s)
            if bargain is None:
                return True
            rows.append(bargain)
            better = self._better_prices(rows)
            if better is None:
                return False
            # Half way: the corners of the linear programme swing from one GPU class to another.
            mixed = [(old + new) / 2 for old, new in zip(self.prices, better, strict=True)]
            self.prices = self._scaled(mixed if len(rows) < _MAX_ROUNDS - 1 else better)
        return False

    def _scaled(self, prices: Sequence[float]) -> list[float]:
        """Prices at which all GPUs together cost just less than all micro-batches."""
        total = sum(p * n for p, n in zip(prices, self.num_gpus, strict=True))
        factor = (1 - 1e-6) * self.num_micro_batches / total
        return [factor * price for price in prices]

    def _bargain(self, step_s: float) -> tuple[int, CheapestChain] | None:
        """A replica that may cost less than the micro-batches that it does; None proves that none
        does."""
        ranges = [(1, self.num_micro_batches)]
        while ranges:
            low, high = ranges.pop()
            chain = self.pricer.cheapest(step_s, low, self.prices)
            if chain is None or high <= chain.price:
                continue
            # Any number from the chain's price on would be a bargain.
            low = max(low, int(chain.price))
            if high <= max(low, _NARROW * low):
                return high, chain
            middle = min(max(low + 1, int((low * high) ** 0.5)), high)
            ranges.append((low, middle - 1))
            ranges.append((middle, high))
        return None

    def _better_prices(self, rows: Sequence[tuple[int, CheapestChain]]) -> list[float] | None:
        """Least prices at which none of the replicas seen is a bargain; None if all GPUs then cost
        as much as the micro-batches."""
        from scipy.optimize import linprog  # a third of a second

        classes = range(len(self.num_gpus))
        taken = [[-float(chain.gpus.get(c, 0)) for c in classes] for _, chain in rows]
        found = linprog(
            [float(n) for n in self.num_gpus],
            A_ub=taken,
            b_ub=[-float(count) for count, _ in rows],
            method="highs",
        )
        if float(found.fun) >= self.num_micro_batches:
            return None
        return [float(price) + 1e-9 for price in found.x]
