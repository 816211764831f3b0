"""An activation between two stages over gloo, by size: as the runtime sends it, and the two ways.

    python tools/bench_boundary.py                       # this machine's loopback interface
    sudo python tools/bench_boundary.py --mbit 1000      # each stage behind a card of 1 Gbit/s

The two ways: each rank sends its part and the receivers gather them, or a leader sends all of it
to a leader, which broadcasts it.  They take turns, and the ratio of each pair of turns counts, so
that what else the machine does weighs on both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.local_launch import LocalJob, run_jobs
from megatron_hetero.runtime.job.world import World
from megatron_hetero.runtime.parallel.boundary import LED_BELOW_BYTES, Boundary
from megatron_hetero.runtime.parallel.groups import RankGroups, build_groups
from tools.shaped_links import shaped_links

Action = Callable[[], None]

LAYOUTS = ("tp2:1,tp2:1 @1", "tp4:1,tp2:1 @1", "tp1:1,tp2:1 @1", "tp2:1,tp1:1 @1")
KIB = (4, 16, 64, 128, 256, 512, 1024, 4096, 16384)
_ALWAYS = 1 << 62


def main() -> None:
    """Print the table of all layouts and sizes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mbit", type=float, help="rate of each stage's card; needs root")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of each packet between stages")
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--kib", type=int, nargs="+", default=KIB)
    arguments = parser.parse_args()
    print("| layout | message | runtime | leader | parts | runtime / leader | parts / leader |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for layout in LAYOUTS:
        for kib, turns in _measure(layout, arguments).items():
            ours, leader, parts = (statistics.median(way) for way in zip(*turns, strict=True))
            ratio = statistics.median(turn[0] / turn[1] for turn in turns)
            of_parts = statistics.median(turn[2] / turn[1] for turn in turns)
            cells = (*(f"{s * 1e3:.2f} ms" for s in (ours, leader, parts)), f"{ratio:.2f}")
            print(f"| `{layout[:-3]}` | {kib} KiB | {' | '.join(cells)} | {of_parts:.2f} |")


def _measure(layout: str, arguments: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Measure [KiB] -> seconds of each turn: the runtime's way, through leaders, in parts."""
    plan = plan_from_layout(parse_layout(layout))
    places = rank_table(plan)
    with (
        tempfile.TemporaryDirectory(prefix="bench-boundary-") as name,
        shaped_links(2, arguments.mbit, arguments.delay_ms) as enter,
    ):
        folder = Path(name)

        def run(rank: int) -> None:
            enter(places[rank].stage)
            backend.activate_cpu_backend()
            world = World.from_environment()
            dist.init_process_group(
                "gloo", store=world.store(), rank=world.rank, world_size=world.size
            )
            groups = build_groups(plan, timedelta(minutes=5))
            found = {}
            for kib in arguments.kib:
                ways = [
                    send_straight(groups, kib << 8, LED_BELOW_BYTES),
                    send_straight(groups, kib << 8, _ALWAYS),
                    send_straight(groups, kib << 8, 0),
                ]
                turns = [[timed(way) for way in ways] for _ in range(arguments.turns + 2)]
                found[kib] = turns[2:]
            if rank == 0:
                (folder / "turns.json").write_text(json.dumps(found))
            dist.barrier()

        run_jobs([LocalJob("boundary", len(places), run, folder)], 600)
        found: dict[str, list[list[float]]] = json.loads((folder / "turns.json").read_text())
    return found


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
            arrived = boundary.take()
            if float(arrived[0]) != 0.0 or float(arrived[-1]) != float(tensor[-1]):
                raise RuntimeError("the activation did not arrive whole")

    return exchange


def timed(action: Action) -> float:
    """Return the seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    action()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


if __name__ == "__main__":
    main()
