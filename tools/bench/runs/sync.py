"""How the runtime's exchanges compare with the usual ones, side by side in one run over gloo.

    python tools/bench sync                       # this machine's loopback interface
    sudo python tools/bench sync --mbit 1000      # each node behind a card of 1 Gbit/s

Gradient sync: one collective for each set of holders, as the runtime does it, beside one for each
tensor's slice.  Boundary: each byte once from its holder to its user, beside a leader that sends
everything to a leader, which broadcasts it.  Both ways move the same numbers and are checked to
give the same result.  They take turns; the ratio of each pair of turns counts, so that what else
the machine does weighs on both alike.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.plan.sharding.shards import shard_edges
from megatron_hetero.runtime.gradients.buckets import plan_buckets
from megatron_hetero.runtime.gradients.memory import BucketViews, arrange, main_grad
from megatron_hetero.runtime.gradients.reduction import Reduction
from megatron_hetero.runtime.parallel.building import build_groups
from megatron_hetero.runtime.parallel.groups import RankGroups
from megatron_hetero.runtime.parallel.shards import ParameterShard
from megatron_hetero.runtime.parallel.traffic import RankTraffic
from tools.bench.jobs import quoted
from tools.bench.ranks import Action, links, on_ranks, timed
from tools.bench.runs.boundary import require_arrived, send_straight
from tools.bench.show import Columns, option

SYNC_LAYOUTS = ("tp2:{L} @1 | tp1:{L} @1", "tp3:{L} @1 | tp2:{L} @1", "tp2:{L} @1 | tp2:{L} @1")
BOUNDARY_LAYOUTS = ("tp2:1,tp2:1 @1", "tp4:1,tp2:1 @1", "tp2:1,tp1:1 @1")


@dataclass(frozen=True)
class Size:
    """Of the gradients: layers and hidden size; of the boundary: MiB."""

    name: str
    num_layers: int
    hidden: int
    boundary_mib: float


SIZES = (Size("large", 2, 768, 16.0), Size("small", 12, 96, 0.0625))


class _Parameter:
    """What the sync reads of a parameter."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.main_grad: torch.Tensor

    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


def sync_actions(groups: RankGroups, plan: Plan, size: Size) -> tuple[Action, Action, float]:
    """Make two exchanges of the gradients of a GPT's layers: by buckets and slice by slice."""
    places = rank_table(plan)
    tables = [
        _shards(size, plan.replicas[p.replica].stages[p.stage].shape.tensor_parallel, p.tensor_rank)
        for p in places
    ]
    stages = [(p.replica, p.stage) for p in places]
    rank = dist.get_rank()
    shards = tables[rank]
    parameters: Any = {
        name: _Parameter([stop - start for start, stop in _box(shard)])
        for name, shard in shards.items()
    }
    values = list(parameters.values())
    gradients = torch.zeros(sum(p.numel() for p in values))
    buffer = SimpleNamespace(params=values, grad_data=gradients, extra_main_grads=[])
    buckets = plan_buckets(tables, stages)
    own = [b for b in buckets if rank in b.holders]
    arrange([SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[])], own, parameters)
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for bucket in buckets:
        if bucket.holders not in made:
            made[bucket.holders] = dist.new_group(list(bucket.holders))
    unchecked = SimpleNamespace(check_for_nan_in_grad=False, check_for_large_grads=False)
    reductions = [
        Reduction(
            BucketViews(b.slices, shards, parameters),
            made[b.holders],
            [],
            RankTraffic(0),
            unchecked,
        )
        for b in own
    ]

    def fill() -> None:
        torch.manual_seed(rank)
        gradients.normal_()

    def by_bucket() -> None:
        for reduction in reductions:
            reduction.launch(1.0)
        for reduction in reductions:
            reduction.finish()

    def by_slice() -> None:
        for bucket in own:
            for _, view in BucketViews(bucket.slices, shards, parameters).views(main_grad):
                flat = view.contiguous()
                dist.all_reduce(flat, group=made[bucket.holders])
                if flat is not view:
                    view.copy_(flat)

    fill()
    by_bucket()
    expected = gradients.clone()
    fill()
    by_slice()
    if not torch.allclose(gradients, expected, rtol=1e-5, atol=1e-6):
        raise RuntimeError("the two ways do not give the same sums")
    gradients.zero_()
    return by_bucket, by_slice, gradients.nbytes / 2**20


def _shards(size: Size, width: int, index: int) -> Mapping[str, ParameterShard]:
    """Return a rank's part of the layers of a GPT."""
    h = size.hidden
    shapes = {
        "input_layernorm.weight": ((h,), None),
        "self_attention.linear_qkv.weight": ((3 * h, h), 0),
        "self_attention.linear_qkv.bias": ((3 * h,), 0),
        "self_attention.linear_proj.weight": ((h, h), 1),
        "self_attention.linear_proj.bias": ((h,), None),
        "pre_mlp_layernorm.weight": ((h,), None),
        "mlp.linear_fc1.weight": ((4 * h, h), 0),
        "mlp.linear_fc1.bias": ((4 * h,), 0),
        "mlp.linear_fc2.weight": ((h, 4 * h), 1),
        "mlp.linear_fc2.bias": ((h,), None),
    }
    table = {}
    for layer in range(size.num_layers):
        for name, (shape, dim) in shapes.items():
            key = f"decoder.layers.{layer}.{name}"
            along = dim or 0
            edges = (0, shape[along]) if dim is None else shard_edges(shape[along], width)
            at = 0 if dim is None else index
            interval = (edges[at], edges[at + 1])
            table[key] = ParameterShard(key, shape, along, (interval,), dim is not None, False)
    return table


def _box(shard: ParameterShard) -> list[tuple[int, int]]:
    box = [(0, n) for n in shard.global_shape]
    box[shard.dim] = shard.intervals[0]
    return box


def boundary_actions(groups: RankGroups, plan: Plan, size: Size) -> tuple[Action, Action, float]:
    """Make two sends of an activation from a stage to the next: straight, and from leader to
    leader."""
    stage, way = groups.pipeline.stage, groups.hops[0].forward[0]
    number = int(size.boundary_mib * 2**18)
    peer = groups.stage_ranks[1 - stage].ranks[0]
    tensor = torch.arange(number, dtype=torch.float32) if stage == 0 else torch.empty(number)

    def through_leaders() -> None:
        leads = groups.tensor.rank() == 0
        if stage == 0:
            if leads:
                dist.send(tensor, peer, group=way)
            return
        if leads:
            dist.recv(tensor, peer, group=way)
        if groups.tensor.size() > 1:
            dist.broadcast(tensor, group=groups.tensor, group_src=0)
        require_arrived(tensor)

    return send_straight(groups, number, 0), through_leaders, tensor.nbytes / 2**20


Actions = Callable[[RankGroups, Plan, Size], tuple[Action, Action, float]]
COLUMNS = Columns({
    "what": "{what}", "layout": lambda row: quoted(row["layout"]), "size": "{mib:.2f} MiB",
    "ours": "{ours_ms:.1f} ms", "usual": "{usual_ms:.1f} ms", "usual / ours": "{ratio:.2f}",
    "range": "{least:.2f} to {most:.2f}",
})  # fmt: skip


OPTIONS = (
    *links("node"),
    option("--card-per-gpu", action="store_true", help="every rank is a node"),
    option("--turns", type=int, default=7),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any]]:
    """Run both exchanges of each size and layout in turns."""
    yield COLUMNS
    for size in SIZES:
        for template in SYNC_LAYOUTS:
            layout = template.format(L=size.num_layers)
            yield _measured("sync", layout, size, sync_actions, given)
        for layout in BOUNDARY_LAYOUTS:
            yield _measured("boundary", layout, size, boundary_actions, given)


def _measured(
    what: str, layout: str, size: Size, actions: Actions, given: argparse.Namespace
) -> dict[str, Any]:
    plan = plan_from_layout(parse_layout(layout))
    places = rank_table(plan)
    stages = sorted({(p.replica, p.stage) for p in places})
    node_of = [
        rank if given.card_per_gpu else stages.index((p.replica, p.stage))
        for rank, p in enumerate(places)
    ]

    def measure() -> dict[str, Any]:
        groups = build_groups(plan, timedelta(minutes=5))
        ours, usual, mib = actions(groups, plan, size)
        turns = [(timed(ours), timed(usual)) for _ in range(given.turns + 1)][1:]
        return {"turns": turns, "mib": mib}

    found = on_ranks(node_of, measure, given.mbit, given.delay_ms)
    ratios = [usual / ours for ours, usual in found["turns"]]
    ours_s, usual_s = (statistics.median(times) for times in zip(*found["turns"], strict=True))
    return {
        "what": what, "layout": layout, "mib": found["mib"],
        "ours_ms": ours_s * 1e3, "usual_ms": usual_s * 1e3,
        "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
    }  # fmt: skip
