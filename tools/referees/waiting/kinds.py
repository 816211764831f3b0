"""Ways to make a stage of GPUs, as the bound for pipelines whose stages wait asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_hetero.bounds.chains.kinds import GpuClass
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cost.model import CostModel
from tools.referees.waiting.rules import FillRules
from tools.referees.waiting.table import PLACES, Floats, Ints, StageKinds


class KindMaker:
    """Every way to make a stage, for any numbers of replicas."""

    def __init__(self, costs: CostModel, rules: FillRules, classes: Sequence[GpuClass]) -> None:
        self._rules = rules
        self._nodes: list[Sequence[Node]] = []
        self._exchanges: dict[int, tuple[Floats, Floats]] = {}
        self.num_layers = costs.workload.model.num_layers
        rows, pieces, limits = [], [], []
        for index, c in enumerate(classes):
            for width in c.widths:
                most = _most_layers(costs, c.node, width)
                if most.max() > 0:
                    rows.append((index, width))
                    limits.append(most)
                    pieces.append(costs.pieces(c.node, width, costs.workload.model.vocab_size))
                    self._nodes.append(c.nodes)
        self.is_empty = not rows
        if self.is_empty:
            return
        loads = [
            [
                [
                    rules.boundary_s(classes[i].nodes, w, classes[j].nodes, v, to_last)
                    for j, v in rows
                ]
                for i, w in rows
            ]
            for to_last in (False, True)
        ]
        num = len(rows)
        self._plain = StageKinds(
            gpu_class=np.array([index for index, _ in rows]),
            width=np.array([width for _, width in rows]),
            layer_s=np.array([p.layer.total_s for p in pieces]),
            embedding_s=np.array([p.embedding.total_s for p in pieces]),
            head_s=np.array([p.head.total_s for p in pieces]),
            fill_s=np.zeros(num),
            exchange_s=np.zeros((num, 4, self.num_layers + 1)),
            out_s=np.array([[pair[0] for pair in row] for row in loads[0]]),
            into_s=np.array([[pair[1] for pair in row] for row in loads[0]]),
            into_last_s=np.array([[pair[1] for pair in row] for row in loads[1]]),
            max_layers=np.array(limits),
        )

    def plain(self) -> StageKinds:
        """Without any exchange."""
        return self._plain

    def of_replicas(self, fewest: int, most: int) -> StageKinds:
        """The least of any of these numbers of replicas."""
        found = [self._exchange(number) for number in range(fewest, most + 1)]
        return replace(
            self._plain,
            fill_s=np.stack([fill for fill, _ in found]).min(axis=0),
            exchange_s=np.stack([exchange for _, exchange in found]).min(axis=0),
        )

    def _exchange(self, num_replicas: int) -> tuple[Floats, Floats]:
        if num_replicas not in self._exchanges:
            rules, kinds = self._rules, self._plain
            own = list(zip(self._nodes, map(int, kinds.width), strict=True))
            fill = [rules.layer_exchange_s(nodes, w, num_replicas) for nodes, w in own]
            exchange = [
                [
                    [
                        rules.stage_exchange_s(nodes, w, layers, *ends, num_replicas)
                        for layers in range(self.num_layers + 1)
                    ]
                    for ends in PLACES
                ]
                for nodes, w in own
            ]
            self._exchanges[num_replicas] = np.array(fill), np.array(exchange)
        return self._exchanges[num_replicas]


def _most_layers(costs: CostModel, node: Node, width: int) -> Ints:
    """Layers that memory allows, [micro-batches in flight - 1, place]."""
    model, training = costs.workload.model, costs.workload.training
    num_micro_batches = training.global_batch_size // training.micro_batch_size
    depth = min(num_micro_batches, model.num_layers)
    limits = np.full((depth, len(PLACES)), model.num_layers)
    if training.use_distributed_optimizer:  # its memory depends on all replicas
        return limits
    for in_flight in range(1, depth + 1):
        for place, ends in enumerate(PLACES):
            memory = costs.memory(node, width, *ends, in_flight, model.vocab_size)
            limits[in_flight - 1, place] = max(0, min(memory.max_layers, model.num_layers))
    return limits
