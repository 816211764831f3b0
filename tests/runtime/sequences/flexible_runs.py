"""Jobs with `--hetero-sequences` on invented machines, with random deals, and one process of stock
Megatron that trains the same documents one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core import parallel_state as mpu
from megatron.training import get_args

from megatron_hetero.lab.kit.documents import train_whole
from megatron_hetero.lab.kit.documents import write_documents as write_indexed
from megatron_hetero.lab.verify.processes.record import RankRecord, read_record
from megatron_hetero.lab.verify.processes.recorder import Recorder
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from megatron_hetero.runtime.sequences import schedule, steps
from megatron_hetero.runtime.sequences.own_batch import OwnBatch
from megatron_hetero.sequences.step_tokens import GroupTokens, StepTokens
from megatron_hetero.sequences.tree import GroupTree

EOD = 100
CLUSTER = """
version: 1
gpu_types:
  FAST: {memory: 80 GB, memory_bandwidth: 2000 GB/s, bf16: 120 TFLOPS, fp16: 120 TFLOPS,
         fp32: 60 TFLOPS, compute_capability: "8.0"}
  SLOW: {memory: 40 GB, memory_bandwidth: 700 GB/s, bf16: 40 TFLOPS, fp16: 40 TFLOPS,
         fp32: 20 TFLOPS, compute_capability: "8.0"}
  BRISK: {memory: 24 GB, memory_bandwidth: 20 GB/s, bf16: 4 GFLOPS, fp16: 4 GFLOPS,
          fp32: 4 GFLOPS, compute_capability: "8.0"}
  TIRED: {memory: 24 GB, memory_bandwidth: 20 GB/s, bf16: 2 GFLOPS, fp16: 2 GFLOPS,
          fp32: 2 GFLOPS, compute_capability: "8.0"}
links:
  inside_node:
    FAST: {bandwidth: 200 GB/s, latency: 2 us}
    SLOW: {bandwidth: 25 GB/s, latency: 5 us}
    BRISK: {bandwidth: 1 GB/s, latency: 20 ms}
    TIRED: {bandwidth: 1 GB/s, latency: 20 ms}
  between_nodes:
    main: {bandwidth: 25 GB/s, latency: BETWEEN}
nodes:
"""
SMALL = (
    "--num-layers=2", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=64",
    "--max-position-embeddings=256", "--lr=1e-2", "--train-iters=2",
    "--tokenizer-type=NullTokenizer", "--vocab-size=101", "--make-vocab-size-divisible-by=1",
    "--eval-iters=0", "--eval-interval=1000", "--log-interval=1", "--num-workers=0",
    "--attention-dropout=0", "--hidden-dropout=0", "--lr-decay-style=constant",
    "--init-method-std=0.3", "--split=1,0,0", "--optimizer=sgd", "--clip-grad=0",
)  # fmt: skip


def write_documents(prefix: Path, lengths: Sequence[int]) -> list[numpy.ndarray]:
    """Write an indexed data set of random documents, each with an end; return them."""
    return write_indexed(prefix, lengths, EOD)


def write_cluster(path: Path, between: str = "10 us", **nodes: tuple[str, int]) -> Path:
    """Describe machines by name: type of GPU and how many; `between` them is that latency."""
    lines = [f"  - {{name: {n}, gpu: {gpu}, count: {count}}}" for n, (gpu, count) in nodes.items()]
    path.write_text(CLUSTER.replace("BETWEEN", between) + "\n".join(lines) + "\n")
    return path


def random_step(
    tree: GroupTree, documents: steps.Documents, drawn: random.Random, heads: int = 1
) -> StepTokens:
    """Deal documents at random: groups of the tree that do not overlap, some ranks idle, several
    sequences in a group, members with any share of a sequence, none too; in domains that can
    exchange so many heads."""
    left = list(range(len(documents)))
    drawn.shuffle(left)
    micro_batches = []
    usable = [group for group in tree.groups if tree.kinds[group.kind].prices]
    while left:
        groups: list[GroupTokens] = []
        taken: set[int] = set()
        for group in drawn.sample(usable, len(usable)):
            ranks = set(range(group.first, group.stop))
            if taken & ranks or not left or drawn.random() < 0.3:
                continue
            taken |= ranks
            own = tuple(left.pop() for _ in range(min(len(left), drawn.randint(1, 3))))
            tokens = tuple(_shares(len(documents[k]["tokens"]), len(ranks), drawn) for k in own)
            domains = _domains(len(ranks), heads, drawn)
            groups.append(GroupTokens(group.first, own, tokens, 1.0, domains))
        if groups:
            micro_batches.append(tuple(groups))
    return StepTokens(tuple(micro_batches))


def _shares(length: int, members: int, drawn: random.Random) -> tuple[int, ...]:
    cuts = sorted(drawn.randint(0, length) for _ in range(members - 1))
    return tuple(b - a for a, b in pairwise([0, *cuts, length]))


def _domains(members: int, heads: int, drawn: random.Random) -> tuple[int, ...]:
    if heads == 1:
        return ()
    found: list[int] = []
    while sum(found) < members:
        left = range(1, members - sum(found) + 1)
        found.append(drawn.choice([width for width in left if heads % width == 0]))
    return tuple(found)


def deal_at_random(seed: int, heads: int = 1) -> Callable[[int], None]:
    """Return a beginning of a rank in which steps are dealt at random."""

    def begin(rank: int) -> None:
        drawn = random.Random(seed)

        def deal(tree: GroupTree, documents: steps.Documents) -> steps.Dealt:
            return random_step(tree, documents, drawn, heads), ""

        steps.dealt_tokens = deal

    return begin


def flexible_job(
    folder: Path,
    cluster: Path,
    num_ranks: int,
    flags: Sequence[str],
    begin: Callable[[int], None] | None = None,
) -> LocalJob:
    """A job through the door that users take, recorded; `begin(rank)` runs before it."""

    def train(rank: int) -> None:
        save_without_a_server()
        if begin is not None:
            begin(rank)
        recorder, losses = Recorder(), _TokenLosses()
        schedule.forward_step = losses.recorded(schedule.forward_step)
        argv = [*SMALL, "--hetero-sequences=flexible", f"--hetero-cluster={cluster}", *flags]
        entry.main([*argv, f"--data-cache-path={folder / 'cache'}"], recorder)
        recorder.save(folder / f"record-{rank}")
        losses.save(folder / f"losses-{rank}.npz")

    return LocalJob(folder.name, num_ranks, train, folder)


class _TokenLosses:
    """The loss of every token that a rank computes, by what stands before it."""

    def __init__(self) -> None:
        self._found: list[numpy.ndarray] = []

    def recorded(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(data_iterator: Any, model: Any) -> Any:
            batch: list[OwnBatch] = []

            def noted() -> Iterator[OwnBatch]:
                batch.append(next(data_iterator))
                yield batch[0]

            output, loss_func = forward_step(noted(), model)
            has_losses = mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0
            if torch.is_grad_enabled() and has_losses:
                self.note(output, batch[0].tokens, batch[0].position_ids, batch[0].loss_mask)
            return output, loss_func

        return step

    def note(self, output: Any, tokens: Any, positions: Any, mask: Any) -> None:
        step = torch.full_like(output, get_args().curr_iteration + 1)
        parts = [tokens, positions, mask, output, step]
        rows = torch.stack([p.detach().double().view(-1) for p in parts], dim=1)
        self._found.append(rows.numpy())

    def save(self, path: Path) -> None:
        numpy.savez(path, *self._found)


def token_losses(folder: Path, num_ranks: int) -> numpy.ndarray:
    """Every counted token of a run: token, position, 1, loss, step; sorted, shape [tokens, 5]."""
    rows = []
    for rank in range(num_ranks):
        with numpy.load(folder / f"losses-{rank}.npz") as saved:
            rows += [saved[name] for name in saved.files]
    found = numpy.concatenate(rows)
    found = found[found[:, 2] > 0]
    return found[numpy.lexsort((found[:, 3], found[:, 1], found[:, 0], found[:, 4]))]


def stock_job(folder: Path, flags: Sequence[str]) -> LocalJob:
    """One process of stock Megatron with attention of its own, one document a micro-batch."""

    def train(rank: int) -> None:
        recorder, losses = Recorder(), _TokenLosses()
        argv = (*SMALL, *flags, f"--data-cache-path={folder / 'cache'}")
        train_whole(argv, recorder, losses.note)
        recorder.save(folder / f"record-{rank}")
        losses.save(folder / f"losses-{rank}.npz")

    return LocalJob(folder.name, 1, train, folder)


def records(job: LocalJob) -> list[RankRecord]:
    """What the ranks of a job recorded."""
    return [read_record(job.directory / f"record-{rank}") for rank in range(job.num_ranks)]
