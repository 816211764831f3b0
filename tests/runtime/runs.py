"""Training runs of tests: a plan through the entry, or one process of stock Megatron, recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_hetero.lab.verify.processes.record import RankRecord, read_record
from megatron_hetero.lab.verify.processes.recorder import Recorder
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from tests.runtime.workloads import plan


def plan_of(asked: str | Plan) -> Plan:
    return asked if isinstance(asked, Plan) else plan(asked)


def train(
    folder: Path, asked: str | Plan | None, argv: Sequence[str], num_ranks: int = 1
) -> list[RankRecord]:
    """Train a plan with our entry, or `num_ranks` processes of stock Megatron if there is none."""
    if asked is not None:
        num_ranks = plan_of(asked).layout.num_devices
    common = [*argv, f"--data-cache-path={folder / 'cache'}", "--override-opt-param-scheduler"]

    plan_flag = f"--hetero-layout={asked}"
    if isinstance(asked, Plan):
        folder.mkdir(parents=True)
        save_plan(asked, folder / "plan.json")
        plan_flag = f"--hetero-plan={folder / 'plan.json'}"

    def run(rank: int) -> None:
        save_without_a_server()
        recorder = Recorder()
        if asked is None:
            backend.activate_cpu_backend()
            entry.train_stock(common, entry.World.from_environment(), recorder)
        else:
            entry.main([*common, plan_flag], recorder)
        recorder.save(folder / f"record-{rank}")

    run_jobs([LocalJob(folder.name, num_ranks, run, folder)], 120)
    return [read_record(folder / f"record-{rank}") for rank in range(num_ranks)]


def whole_weights(ranks: Sequence[RankRecord], step: int) -> dict[str, bytes]:
    """The model's weights, put together from the shards of all ranks, which must agree."""
    whole: dict[str, numpy.ndarray] = {}
    for record in ranks:
        for name, shard in record.shards.items():
            tensor = whole.setdefault(name, numpy.full(shard.global_shape, numpy.nan, "float32"))
            offset = 0
            for start, stop in shard.intervals:
                place = (slice(None),) * shard.dim + (slice(start, stop),)
                local = (slice(None),) * shard.dim + (slice(offset, offset + stop - start),)
                part = record.arrays[f"weight/{step}/{name}"][local]
                known = ~numpy.isnan(tensor[place])
                assert numpy.array_equal(tensor[place][known], part[known])
                tensor[place] = part
                offset += stop - start
    assert not any(numpy.isnan(tensor).any() for tensor in whole.values())
    return {name: tensor.tobytes() for name, tensor in sorted(whole.items())}


def checkpoint_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by key."""
    reader = FileSystemReader(checkpoint)
    entries: dict[str, Any] = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return state
