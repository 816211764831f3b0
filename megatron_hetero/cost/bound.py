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
    "whole replicas, which GPUs share a node, stage boundaries, part of the gradient exchange, "
    "update"
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
_FIRST_RATIO = 1.06
_LAST_RATIO = 1.005
"""Step times proved one after the other grow by these ratios, ever smaller."""
_MAX_ROUNDS = 10
_MAX_WORK = 100_000_000
"""States looked at: after that nothing more is proved."""
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
    num_layers = costs.workload.model.num_layers
    num_options = sum(len(c.widths) for c in classes)
    if not classes or num_gpus > _MAX_GPUS or num_layers * num_options > _MAX_LAYER_OPTIONS:
        return Bound(work_s, WORK_BOUND_RELAXES)
    training = costs.workload.training
    num_micro_batches = training.global_batch_size // training.micro_batch_size
    provers = []
    for fewest, most in _replica_ranges(costs, min(num_micro_batches, num_gpus)):
        options = [o for index, c in enumerate(classes) for o in _options(costs, c, index, fewest)]
        if options:
            gpus = [c.num_gpus for c in classes]
            pricer = ChainPricer(options, num_layers)
            provers.append(_Prover(pricer, gpus, num_micro_batches, (fewest, most)))
    proved_s, ratio = work_s, _FIRST_RATIO
    while ratio > _LAST_RATIO and proved_s < _LONGEST * work_s:
        if _all_impossible(provers, ratio * proved_s):
            proved_s *= ratio
        else:
            ratio **= 0.5
    return Bound(proved_s, BOUND_RELAXES)


def _all_impossible(provers: list[_Prover], step_s: float) -> bool:
    """Whether no number of replicas allows the step time; the prover that fails comes first from
    then on."""
    for index, prover in enumerate(provers):
        if sum(p.pricer.work for p in provers) > _MAX_WORK or not prover.is_impossible(step_s):
            provers.insert(0, provers.pop(index))
            return False
    return True


def _replica_ranges(costs: CostModel, most: int) -> list[tuple[int, int]]:
    """Numbers of replicas that are bounded together: 1, 2, 3 to 4, 5 to 8, ..."""
    wanted = costs.cluster.limits.num_replicas
    if wanted is not None:
        return [(wanted, wanted)]
    ranges, fewest, end = [], 1, 1
    while fewest <= most:
        ranges.append((fewest, min(end, most)))
        fewest, end = end + 1, 2 * end
    return ranges


@dataclass
class _Class:
    """GPUs that are alike wherever they are, but for who their neighbours are."""

    nodes: list[Node]
    widths: tuple[int, ...]
    num_gpus: int

    @property
    def node(self) -> Node:
        """One of them."""
        return self.nodes[0]


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
            found[key].nodes.append(node)
        else:
            found[key] = _Class([node], widths, num_gpus)
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


def _options(
    costs: CostModel, gpu_class: _Class, index: int, num_replicas: int
) -> list[StageOption]:
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
            min(
                (costs.least_sync(node, width, num_replicas) for node in gpu_class.nodes),
                key=lambda sync: sync.layer_s,
            ),
        )
        if max(rows[0]) > 0:
            options.append(option)
    return options


class _Prover:
    """Looks for prices that prove a step time impossible; keeps the last ones to start from."""

    def __init__(
        self,
        pricer: ChainPricer,
        num_gpus: Sequence[int],
        num_micro_batches: int,
        num_replicas: tuple[int, int],
    ) -> None:
        self.pricer = pricer
        self.num_gpus = num_gpus
        self.num_micro_batches = num_micro_batches
        self.num_replicas = num_replicas
        speeds = [0.0] * len(num_gpus)
        for option in pricer.options:
            speed = 1 / (option.width * option.layer_s)
            speeds[option.gpu_class] = max(speeds[option.gpu_class], speed)
        self.prices = self._scaled([*speeds, 0.0])
        """Of one GPU of each class; the last is that of any replica, which may be negative."""

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
            self.prices = self._scaled(better)
        return False

    def _total(self, prices: Sequence[float]) -> float:
        """Most that all replicas of all GPUs cost together."""
        gpus = sum(p * n for p, n in zip(prices, self.num_gpus, strict=False))
        return gpus + max(prices[-1] * n for n in self.num_replicas)

    def _scaled(self, prices: Sequence[float]) -> list[float]:
        """Prices at which all GPUs together cost just less than all micro-batches."""
        factor = (1 - 1e-6) * self.num_micro_batches / self._total(prices)
        return [factor * price for price in prices]

    def _bargain(self, step_s: float) -> tuple[int, CheapestChain] | None:
        """A replica that may cost less than the micro-batches that it does; None proves that none
        does."""
        fewest, most = self.num_replicas
        largest = self.num_micro_batches - fewest + 1
        ranges = [(1 if most > 1 else largest, largest)]
        while ranges:
            low, high = ranges.pop()
            chain = self.pricer.cheapest(step_s, low, self.prices)
            if chain is None or high <= chain.price + self.prices[-1]:
                continue
            # Any number from the chain's price on would be a bargain.
            low = max(low, int(chain.price + self.prices[-1]))
            if high <= max(low, _NARROW * low):
                return high, chain
            middle = min(max(low + 1, int((low * high) ** 0.5)), high)
            ranges.append((low, middle - 1))
            ranges.append((middle, high))
        return None

    def _better_prices(self, rows: Sequence[tuple[int, CheapestChain]]) -> list[float] | None:
        """Prices at which the replicas seen are as far from a bargain as can be, in parts of what
        they do; None if some is one at any prices."""
        from scipy.optimize import linprog  # a third of a second

        classes = range(len(self.num_gpus))
        fewest, most = self.num_replicas
        # The replica's price is a difference of two that are not negative; the margin comes last.
        rising = [
            [-float(c.gpus.get(k, 0)) for k in classes] + [-1.0, 1.0, float(count)]
            for count, c in rows
        ]
        total = [float(n) for n in self.num_gpus] + [float(most), -float(fewest), 0.0]
        largest = float(self.num_micro_batches)
        found = linprog(
            [0.0] * (len(total) - 1) + [-1.0],
            A_ub=rising,
            b_ub=[-float(count) for count, _ in rows],
            A_eq=[total],
            b_eq=[largest],
            bounds=[(0, None)] * len(self.num_gpus) + [(0, largest)] * 2 + [(None, 1.0)],
            method="highs",
        )
        if found.x is None or float(found.x[-1]) <= 0:
            return None
        *prices, above, below, _ = (float(price) for price in found.x)
        return [*(price + 1e-9 for price in prices), above - below]
