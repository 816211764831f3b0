"""An activation between two stages over gloo, by size: as the runtime sends it, and the two ways.

    python tools/bench boundary                       # this machine's loopback interface
    sudo python tools/bench boundary --mbit 1000      # each stage behind a card of 1 Gbit/s

The two ways: each rank sends its part and the receivers gather them, or a leader sends all of it
to a leader, which broadcasts it.  They take turns, and the ratio of each pair of turns counts, so
that what else the machine does weighs on both alike.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import torch

from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.parallel.boundary import Boundary
from megatron_hetero.runtime.parallel.building import build_groups
from megatron_hetero.runtime.parallel.groups import RankGroups
from megatron_hetero.runtime.parallel.pipeline import LED_BELOW_BYTES
from tools.bench.ranks import Action, links, on_ranks, timed
from tools.bench.show import Columns, option

LAYOUTS = ("tp2:1,tp2:1 @1", "tp4:1,tp2:1 @1", "tp1:1,tp2:1 @1", "tp2:1,tp1:1 @1")
KIB = (4, 16, 64, 128, 256, 512, 1024, 4096, 16384)
_ALWAYS = 1 << 62


def send_straight(groups: RankGroups, num_elements: int, led_below: int) -> Action:
    """An activation of fp32 from the first stage to the second, through the runtime's boundary."""
    stage = groups.pipeline.stage
    hop = groups.hops[0]
    config = SimpleNamespace(sequence_parallel=False, pipeline_dtype=torch.float32)
    peers = groups.stage_ranks[1 - stage]
    ways = (hop.forward, hop.backward) if stage == 0 else (hop.backward, hop.forward)
    boundary = Boundary(groups, peers, *ways, config, groups.stage_ranks[stage], (), led_below)
    tensor = torch.arange(num_elements, dtype=torch.float32)

    def exchange() -> None:
        boundary.begin()
        if stage == 0:
            boundary.send(tensor)
            boundary.finish_sends()
        else:
            boundary.post_receive((num_elements,))
            require_arrived(boundary.take())

    return exchange


def require_arrived(tensor: torch.Tensor) -> None:
    """Refuse a tensor that has not come whole: its elements count from 0."""
    if float(tensor[0]) != 0.0 or float(tensor[-1]) != float(tensor.numel() - 1):
        raise RuntimeError("the activation did not arrive whole")


COLUMNS = (
    "layout", "message", "runtime", "leader", "parts", "runtime / leader", "parts / leader",
)  # fmt: skip


OPTIONS = (
    *links("stage"),
    option("--turns", type=int, default=31),
    option("--kib", type=int, nargs="+", default=KIB),
)


def run(given: argparse.Namespace) -> Iterator[Columns | list[str]]:
    """Send activations of all sizes between the stages of each layout."""
    yield Columns.of(COLUMNS)
    for layout in LAYOUTS:
        for kib, turns in _measured(layout, given).items():
            ours, leader, parts = (statistics.median(way) for way in zip(*turns, strict=True))
            ratio = statistics.median(turn[0] / turn[1] for turn in turns)
            of_parts = statistics.median(turn[2] / turn[1] for turn in turns)
            times = (f"{s * 1e3:.2f} ms" for s in (ours, leader, parts))
            yield [f"`{layout[:-3]}`", f"{kib} KiB", *times, f"{ratio:.2f}", f"{of_parts:.2f}"]


def _measured(layout: str, given: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Measure [KiB] -> seconds of each turn: the runtime's way, through leaders, in parts."""
    plan = plan_from_layout(parse_layout(layout))

    def measure() -> dict[int, list[list[float]]]:
        groups = build_groups(plan, timedelta(minutes=5))
        found = {}
        for kib in given.kib:
            limits = (LED_BELOW_BYTES, _ALWAYS, 0)
            ways = [send_straight(groups, kib << 8, limit) for limit in limits]
            found[kib] = [[timed(way) for way in ways] for _ in range(given.turns + 2)][2:]
        return found

    node_of = [place.stage for place in rank_table(plan)]
    found: dict[str, list[list[float]]] = on_ranks(node_of, measure, given.mbit, given.delay_ms)
    return found
