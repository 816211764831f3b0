"""The longest step that prices of GPUs prove impossible, for pipelines that may launch ahead as far
as memory allows: the project's own prices.

`bound_chains` finds the cheapest replica for any number of micro-batches, a linear programme better
prices; steps are tried one after the other, ever less longer than the last one proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hetero.cluster.spec import Node
from megatron_hetero.cost.bound_chains import ChainPricer, CheapestChain, StageOption
from megatron_hetero.cost.bound_kinds import GpuClass
from megatron_hetero.cost.choices import may_mix_sizes, recomputes
from megatron_hetero.cost.memory import StageMemory, with_some_layers_recomputed
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.pieces import PieceTimes
from megatron_hetero.cost.placement import Recompute

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


def launch_bound_s(
    sizes: Sequence[CostModel],
    works_s: Sequence[float],
    classes: Sequence[GpuClass],
    least_s: float,
) -> float:
    """The longest step proved impossible, from `least_s` on.

    Args:
        sizes: the prices at every micro-batch size that plans may choose.
        works_s: bounds by work alone, size by size.
    """
    together = [(sizes, least_s)]
    if not may_mix_sizes(sizes[0]):
        together = [([costs], work_s) for costs, work_s in zip(sizes, works_s, strict=True)]
    provers = []
    for group, group_s in together:
        # Above this time they could not be proved impossible anyway: `_LONGEST` ends the search.
        if group_s < _LONGEST * least_s:
            provers += _provers(group, classes, group_s)
    proved_s, ratio = least_s, _FIRST_RATIO
    while ratio > _LAST_RATIO and proved_s < _LONGEST * least_s:
        if _all_impossible(provers, ratio * proved_s):
            proved_s *= ratio
        else:
            ratio **= 0.5
    return proved_s


def _provers(
    sizes: Sequence[CostModel], classes: Sequence[GpuClass], work_s: float
) -> list[_Prover]:
    """One for each range of numbers of replicas whose micro-batches have any of the sizes."""
    training = sizes[0].workload.training
    batch, least_size = training.global_batch_size, min(_size(costs) for costs in sizes)
    num_layers = sizes[0].workload.model.num_layers
    num_gpus = [c.num_gpus for c in classes]
    provers = []
    for fewest, most in _replica_ranges(sizes[0], min(batch // least_size, sum(num_gpus))):
        pricers = []
        for costs in sizes:
            options = [
                o for index, c in enumerate(classes) for o in _options(costs, c, index, fewest)
            ]
            largest = (batch - (fewest - 1) * least_size) // _size(costs)
            if options and largest:
                pricers.append(_Sized(_size(costs), largest, ChainPricer(options, num_layers)))
        if pricers:
            provers.append(_Prover(pricers, num_gpus, batch, (fewest, most), work_s))
    return provers


def _size(costs: CostModel) -> int:
    return costs.workload.training.micro_batch_size


def _all_impossible(provers: list[_Prover], step_s: float) -> bool:
    """Whether no number of replicas allows the step time; the prover that fails comes first from
    then on."""
    for index, prover in enumerate(provers):
        if sum(p.work for p in provers) > _MAX_WORK or not prover.is_impossible(step_s):
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


def _options(
    costs: CostModel, gpu_class: GpuClass, index: int, num_replicas: int
) -> list[StageOption]:
    """Every width with every recompute, in numbers of recomputed layers from one to the next."""
    vocab_size = costs.workload.model.vocab_size
    options = []
    for width in gpu_class.widths:
        sync = min(
            (costs.least_sync(node, width, num_replicas) for node in gpu_class.nodes),
            key=lambda sync: sync.layer_s,
        )
        variants = {r: costs.variant(recompute=r) for r in recomputes(costs)}
        pieces = {r: v.pieces(gpu_class.node, width, vocab_size) for r, v in variants.items()}
        rows = {r: _rows(v, gpu_class.node, width) for r, v in variants.items()}
        found = [(0.0, pieces[r], rows[r]) for r in variants]
        if len(variants) > 1:
            found += _partly_recomputed(variants, gpu_class.node, width)
        # The first recomputes nothing; what holds no more layers for its recompute is no option.
        least_fit = min(found[0][2][-1])
        for number, (base_s, times, fitting) in enumerate(found):
            if max(fitting[0]) > (least_fit if number else 0):
                options.append(
                    StageOption(
                        index,
                        width,
                        times.embedding.total_s,
                        times.layer.total_s,
                        times.head.total_s,
                        fitting,
                        sync,
                        base_s,
                    )
                )
    return options


_Rows = tuple[tuple[int, int, int, int], ...]
"""As `StageOption.max_layers`."""


def _rows(
    costs: CostModel, node: Node, width: int, partly: tuple[CostModel, int] | None = None
) -> _Rows:
    """Layers that fit, by micro-batches in flight and ends of the model.

    Args:
        partly: a price list that recomputes nothing, and how many layers are recomputed at most.
    """
    model, training = costs.workload.model, costs.workload.training
    num_micro_batches = training.global_batch_size // training.micro_batch_size
    rows = []
    for in_flight in range(1, min(num_micro_batches, model.num_layers) + 1):
        ends = []
        for first, last in ((False, False), (False, True), (True, False), (True, True)):
            most = model.num_layers
            if not training.use_distributed_optimizer:  # its memory depends on all replicas
                asked = (node, width, first, last, in_flight, model.vocab_size)
                memory: StageMemory = costs.memory(*asked)
                if partly is not None:
                    kept = partly[0].memory(*asked)
                    memory = with_some_layers_recomputed(kept, memory, partly[1])
                most = max(0, min(memory.max_layers, most))
            ends.append(most)
        rows.append((ends[0], ends[1], ends[2], ends[3]))
    return tuple(rows)


def _partly_recomputed(
    variants: dict[Recompute, CostModel], node: Node, width: int
) -> list[tuple[float, PieceTimes, _Rows]]:
    """Stages that recompute 1, 2 to 3, 4 to 7, ... of their layers: the seconds of the fewest, the
    memory of the most; (seconds beside those of stages that recompute none, their times, rows)."""
    none, full = variants["none"], variants["full"]
    vocab_size = none.workload.model.vocab_size
    pieces = none.pieces(node, width, vocab_size)
    more_s = full.pieces(node, width, vocab_size).layer.total_s - pieces.layer.total_s
    found, fewest = [], 1
    while fewest < none.workload.model.num_layers:
        rows = _rows(full, node, width, (none, 2 * fewest - 1))
        found.append((fewest * more_s, pieces, rows))
        fewest *= 2
    return found


@dataclass(frozen=True)
class _Sized:
    """Chains whose micro-batches have `size` sequences; `most` micro-batches at most."""

    size: int
    most: int
    pricer: ChainPricer


class _Prover:
    """Looks for prices that prove a step time impossible; keeps the last ones to start from.

    Prices are counted in sequences.
    """

    def __init__(
        self,
        pricers: Sequence[_Sized],
        num_gpus: Sequence[int],
        num_sequences: int,
        num_replicas: tuple[int, int],
        work_s: float,
    ) -> None:
        self.pricers = pricers
        self.num_gpus = num_gpus
        self.num_sequences = num_sequences
        self.num_replicas = num_replicas
        self.work_s = work_s
        """Of all work: no step is shorter."""
        speeds = [0.0] * len(num_gpus)
        for of_size in pricers:
            for option in of_size.pricer.options:
                speed = of_size.size / (option.width * option.layer_s)
                speeds[option.gpu_class] = max(speeds[option.gpu_class], speed)
        self.prices = self._scaled([*speeds, 0.0])
        """Of one GPU of each class; the last is that of any replica, which may be negative."""

    @property
    def work(self) -> int:
        """States looked at so far."""
        return sum(of_size.pricer.work for of_size in self.pricers)

    def is_impossible(self, step_s: float) -> bool:
        """Whether prices were found that prove it."""
        if step_s < self.work_s:
            return True
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
        """Prices at which all GPUs together cost just less than all sequences."""
        factor = (1 - 1e-6) * self.num_sequences / self._total(prices)
        return [factor * price for price in prices]

    def _bargain(self, step_s: float) -> tuple[int, CheapestChain] | None:
        """A replica that may cost less than the sequences that it does, and how many those are;
        None proves that none does."""
        for of_size in self.pricers:
            found = self._bargain_of(of_size, step_s)
            if found is not None:
                return found
        return None

    def _bargain_of(self, of_size: _Sized, step_s: float) -> tuple[int, CheapestChain] | None:
        size, largest = of_size.size, of_size.most
        ranges = [(1 if self.num_replicas[1] > 1 else largest, largest)]
        while ranges:
            low, high = ranges.pop()
            chain = of_size.pricer.cheapest(step_s, low, self.prices)
            if chain is None or high * size <= chain.price + self.prices[-1]:
                continue
            # Any number from the chain's price on would be a bargain.
            low = max(low, int((chain.price + self.prices[-1]) / size))
            if high <= max(low, _NARROW * low):
                return high * size, chain
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
        largest = float(self.num_sequences)
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
