"""Programs in real processes: torch's collectives over gloo, in fp64, beside one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.world import World
from tests.referees.hap.numeric import (
    Array,
    Edges,
    Exchange,
    axis_of,
    edges_of,
    given,
    largest_error,
    own_part,
)
from tests.referees.hap.random_programs import random_program
from tools.referees.hap.layer import SIDE_BY_SIDE, TOGETHER, layer_graph

UNITS = {"sequences": (1, 1, 1), "tokens": (5, 2, 1), "columns": (3, 2, 1), "elements": (4, 2, 1)}


class ProcessExchange(Exchange):
    """Collectives of the GPU that this process plays with those of the others."""

    def __init__(self, edges: Edges, rank: int) -> None:
        self.edges, self.gpus, self.num_gpus = edges, [rank], dist.get_world_size()

    def convert(
        self, parts: Sequence[Array], letters: str, before: str, after: str, shape: tuple[int, ...]
    ) -> list[Array]:
        (part,), (rank,) = parts, self.gpus
        if before == "whole":
            return [part if after == "whole" else own_part(part, letters, after, self.edges, rank)]
        if before == "partial":
            return [self._summed(part, letters, after)]
        if after == "whole":
            pieces = self._gathered(part)
            if before == "elements":
                return [np.concatenate(pieces).reshape(shape)]
            return [np.concatenate(pieces, axis_of(letters, before))]
        return [self._exchanged(part, letters, before, after)]

    def _summed(self, part: Array, letters: str, after: str) -> Array:
        """All-reduce, or to each owner the sum of its part."""
        if after == "whole":
            whole = torch.from_numpy(part.copy())
            dist.all_reduce(whole)
            return whole.numpy()
        owned = part
        for gpu in range(self.num_gpus):
            piece = torch.from_numpy(own_part(part, letters, after, self.edges, gpu).copy())
            dist.reduce(piece, gpu)
            if gpu == self.gpus[0]:
                owned = piece.numpy()
        return owned

    def _shapes(self, part: Array) -> list[tuple[int, ...]]:
        sizes = [torch.zeros(part.ndim, dtype=torch.int64) for _ in range(self.num_gpus)]
        dist.all_gather(sizes, torch.tensor(part.shape))
        return [tuple(size.tolist()) for size in sizes]

    def _gathered(self, part: Array) -> list[Array]:
        pieces = []
        for gpu, shape in enumerate(self._shapes(part)):
            mine = gpu == self.gpus[0]
            piece = (
                torch.from_numpy(part.copy()) if mine else torch.zeros(shape, dtype=torch.float64)
            )
            dist.broadcast(piece, gpu)
            pieces.append(piece.numpy())
        return pieces

    def _exchanged(self, part: Array, letters: str, before: str, after: str) -> Array:
        """All-to-all of unlike pieces, flat."""
        sent = [own_part(part, letters, after, self.edges, gpu) for gpu in range(self.num_gpus)]
        extent = sent[self.gpus[0]].shape[axis_of(letters, after)]
        shapes = [list(shape) for shape in self._shapes(part)]
        for shape in shapes:
            shape[axis_of(letters, after)] = extent
        received = torch.zeros(sum(int(np.prod(shape)) for shape in shapes), dtype=torch.float64)
        dist.all_to_all_single(
            received,
            torch.from_numpy(np.concatenate([piece.reshape(-1) for piece in sent])),
            [int(np.prod(shape)) for shape in shapes],
            [piece.size for piece in sent],
        )
        edges = np.cumsum([0, *[int(np.prod(shape)) for shape in shapes]])
        flat = received.numpy()
        pieces = [flat[edges[i] : edges[i + 1]].reshape(s) for i, s in enumerate(shapes)]
        return np.concatenate(pieces, axis_of(letters, before))


@pytest.mark.timeout(120)
def test_programs_give_in_processes_what_one_device_gives(tmp_path: Path) -> None:
    """Six random programs of a whole layer on three processes, with every kind of collective."""
    programs = [
        (layer_graph(along), random_program(layer_graph(along), Random(seed)))
        for along in (TOGETHER, SIDE_BY_SIDE)
        for seed in range(3)
    ]
    kinds = {one.kind for _, program in programs for one in program}
    assert kinds >= {"all-reduce", "reduce-scatter", "all-gather", "all-to-all", "slice"}

    def run(rank: int) -> None:
        world = World.from_environment()
        dist.init_process_group("gloo", store=world.store(), rank=world.rank, world_size=world.size)
        exchange = ProcessExchange(edges_of(UNITS), rank)
        for seed, (graph, program) in enumerate(programs):
            assert largest_error(graph, program, given(seed), exchange) < 1e-12
        dist.barrier()

    run_jobs([LocalJob("synthesis", 3, run, tmp_path)], 100)
