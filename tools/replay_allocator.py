"""How much of a GPU PyTorch's caching allocator cannot use: whole runs, replayed on smaller cards.

    python tools/replay_allocator.py

Each row trains a small job on CPUs by this project's runtime (Megatron's loop and local layers),
takes torch's own record of every allocation and release of one rank, makes every size so many times
as large that the run fills a card, and replays it under the rules of the allocator of GPUs
(`c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.x in its default settings).  The least card on
which no request fails, beyond the bytes that the run holds at its peak, is what the allocator
needs.  It frees whole segments that nothing lives in before it gives up, so only holes beside
living tensors count.
"""

from __future__ import annotations

import bisect
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Trace = Sequence[tuple[int, int]]
"""(Number of a tensor, its bytes), or (the number, 0) where it is released, in order of time."""

_MIB = 1 << 20
_BLOCK, _SMALL, _SMALL_SEGMENT = 512, _MIB, 2 * _MIB
_LARGE_SEGMENT, _LEAST_OWN, _ROUND_OWN = 20 * _MIB, 10 * _MIB, 2 * _MIB
_CARD_BYTES = 75 * 10**9
"""Bytes of the peak to which a trace is stretched: what an 80 GB card has for tensors."""

JOBS = (
    ("first of two stages", "tp1:9,tp1:7 @4", 0, ""),
    ("last of two stages", "tp1:7,tp1:9 @4", 1, ""),
    ("first of two stages, full recompute", "tp1:9,tp1:7 @4", 0,
     "--recompute-granularity=full --recompute-method=uniform --recompute-num-layers=1"),
    ("one stage, SwiGLU, grouped queries", "tp1:10 @3", 0,
     "--swiglu --group-query-attention --num-query-groups=1 --num-layers=10"),
    ("one stage, fp32", "tp1:10 @3", 0, "--num-layers=10"),
    ("first of two stages, divided optimizer", "tp1:9,tp1:7 @2 | tp1:9,tp1:7 @2", 0,
     "--use-distributed-optimizer"),
)  # fmt: skip
"""(Row, layout, rank, flags)."""

_SHAPE = shlex.split(
    "--num-layers=16 --hidden-size=128 --num-attention-heads=1 --seq-length=512 --vocab-size=1000 "
    "--max-position-embeddings=512 --micro-batch-size=1 --attention-dropout=0 --hidden-dropout=0 "
    "--train-iters=2"
)
"""A model whose layers have about as many bytes of states as a micro-batch has of activations, and
none of whose tensors is a large part of the whole, as of real jobs."""


@dataclass
class _Block:
    """A piece of a segment; `before` and `after` are its neighbours there."""

    size: int
    is_small: bool
    order: int
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None

    @property
    def is_segment(self) -> bool:
        return self.before is None and self.after is None


@dataclass
class Allocator:
    """PyTorch's caching allocator on a card of `capacity` bytes, on one stream."""

    capacity: int
    reserved: int = 0
    _free: dict[bool, list[tuple[int, int, _Block]]] = field(
        default_factory=lambda: {True: [], False: []}
    )
    _num_made: int = 0

    def allocate(self, num_bytes: int) -> _Block | None:
        """Return a block for so many bytes; None if there is no room."""
        size = max(_BLOCK, -(-num_bytes // _BLOCK) * _BLOCK)
        is_small = size <= _SMALL
        block = self._best_fit(size, is_small)
        if block is None:
            block = self._segment(_segment_bytes(size), is_small)
        if block is None:
            # All whole segments that are free go back to CUDA, and it asks once more.
            self._release_segments()
            block = self._segment(_segment_bytes(size), is_small)
        if block is None:
            return None
        rest = block.size - size
        if rest >= _BLOCK if is_small else rest > _SMALL:
            self._num_made += 1
            other = _Block(rest, is_small, self._num_made, True, block, block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            self._keep(other)
        block.is_free = False
        return block

    def release(self, block: _Block) -> None:
        """Take a block back, and join it with free neighbours."""
        block.is_free = True
        for other in (block.before, block.after):
            if other is None or not other.is_free:
                continue
            self._forget(other)
            block.size += other.size
            if other is block.before:
                block.before, beyond = other.before, other.before
                if beyond is not None:
                    beyond.after = block
            else:
                block.after, beyond = other.after, other.after
                if beyond is not None:
                    beyond.before = block
        self._keep(block)

    def _segment(self, size: int, is_small: bool) -> _Block | None:
        if self.reserved + size > self.capacity:
            return None
        self.reserved += size
        self._num_made += 1
        return _Block(size, is_small, self._num_made)

    def _best_fit(self, size: int, is_small: bool) -> _Block | None:
        pool = self._free[is_small]
        at = bisect.bisect_left(pool, size, key=lambda entry: entry[0])
        return pool.pop(at)[2] if at < len(pool) else None

    def _keep(self, block: _Block) -> None:
        bisect.insort(self._free[block.is_small], (block.size, block.order, block))

    def _forget(self, block: _Block) -> None:
        pool = self._free[block.is_small]
        del pool[bisect.bisect_left(pool, (block.size, block.order), key=lambda e: e[:2])]

    def _release_segments(self) -> None:
        for is_small, pool in self._free.items():
            self.reserved -= sum(size for size, _, block in pool if block.is_segment)
            self._free[is_small] = [entry for entry in pool if not entry[2].is_segment]


def _segment_bytes(size: int) -> int:
    """Return the bytes that the allocator asks CUDA for."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _LEAST_OWN:
        return _LARGE_SEGMENT
    return -(-size // _ROUND_OWN) * _ROUND_OWN


def fits(trace: Trace, capacity: int) -> bool:
    """Tell if no request of a trace fails on a card of so many bytes."""
    allocator, living = Allocator(capacity), dict[int, _Block]()
    for number, size in trace:
        if size == 0:
            allocator.release(living.pop(number))
        elif (block := allocator.allocate(size)) is None:
            return False
        else:
            living[number] = block
    return True


def peak_bytes(trace: Trace) -> int:
    """Return the most bytes that live at once."""
    held = peak = 0
    living: dict[int, int] = {}
    for number, size in trace:
        held += size or -living.pop(number)
        if size:
            living[number] = size
        peak = max(peak, held)
    return peak


def largest_released(trace: Trace) -> int:
    """Return the bytes of the largest tensor that is released while the run goes on."""
    sizes = {number: size for number, size in trace if size}
    released = [number for number, size in trace[: len(trace) * 9 // 10] if not size]
    return max((sizes[number] for number in released), default=0)


def least_card_bytes(trace: Trace) -> int:
    """Return the least card on which a trace fits, to 2 MiB, in the neighbourhood of its peak."""
    low = peak_bytes(trace)
    high = low + _SMALL_SEGMENT
    while not fits(trace, high):
        low, high = high, high + 2 * (high - low)
    while high - low > _SMALL_SEGMENT:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(trace, middle) else (middle, high)
    return high


def stretched(trace: Trace, peak: int) -> Trace:
    """Return a trace whose tensors are all so much larger that its peak is about `peak` bytes."""
    factor = max(1, peak // peak_bytes(trace))
    return [(number, size * factor) for number, size in trace]


def recorded(layout: str, rank: int, flags: Sequence[str], folder: Path) -> Trace:
    """Train a job on CPUs and return the trace of a rank."""
    import torch

    from megatron_hetero.lab.kit.small_job import TRAINING, on_this_backend
    from megatron_hetero.plan.build import plan_from_layout
    from megatron_hetero.plan.file import save_plan
    from megatron_hetero.plan.layout import parse_layout
    from megatron_hetero.runtime import backend
    from megatron_hetero.runtime.job import entry
    from megatron_hetero.runtime.job.arguments import HeteroArguments
    from megatron_hetero.runtime.job.local.jobs import LocalJob
    from megatron_hetero.runtime.job.local.launch import run_jobs
    from megatron_hetero.runtime.job.world import World

    plan = plan_from_layout(parse_layout(layout))
    save_plan(plan, folder / "plan.json")
    batch = sum(replica.num_micro_batches for replica in plan.replicas)
    argv = (*_SHAPE, *flags, *TRAINING, f"--global-batch-size={batch}",
            f"--data-cache-path={folder / 'cache'}", *backend.CPU_FLAGS)  # fmt: skip

    def train(own: int) -> None:
        backend.activate_cpu_backend()
        arguments = HeteroArguments(None, folder / "plan.json", "layout-independent", argv)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if own != rank:
            entry.train_asymmetric(plan, arguments, World.from_environment(), None)
            return
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            entry.train_asymmetric(plan, arguments, World.from_environment(), None)
        tree = profiler.profiler.kineto_results.experimental_event_tree()
        (folder / "trace.json").write_text(json.dumps(_trace(tree)))

    size = plan.layout.num_devices
    run_jobs([LocalJob("replay", size, on_this_backend(train), folder / "job")], 600)
    return [(number, size) for number, size in json.loads((folder / "trace.json").read_text())]


def _trace(tree: Sequence[object]) -> list[tuple[int, int]]:
    """Return the trace in torch's tree of events: allocations by address, in order of time."""
    found: list[tuple[int, int, int]] = []
    left = list(tree)
    while left:
        event = left.pop()
        left.extend(event.children)  # type: ignore[attr-defined]
        if event.name == "[memory]":  # type: ignore[attr-defined]
            fields = event.extra_fields  # type: ignore[attr-defined]
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))  # type: ignore[attr-defined]
    found.sort(key=lambda one: one[0])
    at: dict[int, int] = {}
    trace: list[tuple[int, int]] = []
    for number, (_, address, size) in enumerate(found):
        if size > 0:
            at[address] = number
            trace.append((number, size))
        elif address in at:  # what began before the record is not in it
            trace.append((at.pop(address), 0))
    return trace


def main() -> int:
    """Print a row for each job."""
    print("| run | tensors | peak | largest released | least card beyond the peak | part |")
    print("| --- | --: | --: | --: | --: | --: |")
    for name, layout, rank, flags in JOBS:
        with tempfile.TemporaryDirectory() as folder:
            words = [*flags.split(), *([] if "fp32" in name else ["--bf16"])]
            own = recorded(layout, rank, words, Path(folder))
        trace = stretched(own, _CARD_BYTES)
        peak, least = peak_bytes(trace), least_card_bytes(trace)
        more = least - peak
        print(f"| {name} | {len(trace):,} | {peak / 1e9:.1f} GB "
              f"| {largest_released(trace) / 1e9:.2f} GB | {more / 1e9:.2f} GB "
              f"| {more / peak:.1%} |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
