"""Which samples each replica reads: the global batch is the one a single process would take.

Step k of the job covers samples `k*B .. (k+1)*B - 1` of the dataset.  Its micro-batches are dealt
out in rounds, one to each replica that still has some to run, in the order of the samples; with
equal counts that is Megatron's own division among data-parallel ranks.  Ranks that read nothing
(inner stages, all but the first of a tensor-parallel group) get an iterator that says so if it is
asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.groups import RankGroups
from megatron_hetero.runtime.provider import EveryRankProvider


def with_micro_batch_sizes(plan: Plan, job_micro_batch_size: int) -> Plan:
    """The plan with each replica's micro-batch size written out, the job's where it has none."""
    replicas = tuple(
        replace(r, micro_batch_size=r.micro_batch_size or job_micro_batch_size)
        for r in plan.replicas
    )
    return replace(plan, replicas=replicas)


def micro_batch_sizes(plan: Plan) -> tuple[int, ...]:
    """[replica] -> samples in a micro-batch, of a plan `with_micro_batch_sizes`.

    Raises:
        ValueError: a replica has no size written out.
    """
    sizes = tuple(r.micro_batch_size for r in plan.replicas if r.micro_batch_size is not None)
    if len(sizes) != len(plan.replicas):
        raise ValueError("a replica has no micro-batch size; use with_micro_batch_sizes")
    return sizes


def global_batch_size(plan: Plan) -> int:
    """Samples in a step of a plan `with_micro_batch_sizes`."""
    sizes = micro_batch_sizes(plan)
    return sum(r.num_micro_batches * s for r, s in zip(plan.replicas, sizes, strict=True))


def deal(counts: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[range, ...], ...]:
    """Deal a global batch out to replicas.

    Args:
        counts: micro-batches of each replica.
        sizes: samples in a micro-batch of each replica.
    Returns:
        [replica] -> the samples of each of its micro-batches, numbered from the batch's first.
    """
    dealt: list[list[range]] = [[] for _ in counts]
    start = 0
    for round_ in range(max(counts)):
        for replica, (count, size) in enumerate(zip(counts, sizes, strict=True)):
            if round_ < count:
                dealt[replica].append(range(start, start + size))
                start += size
    return tuple(tuple(batches) for batches in dealt)


class ReplicaSampler(Sampler[list[int]]):
    """Batches of sample numbers for one replica, from `consumed` samples on.

    An end of the dataset that is no whole global batch is left out.
    """

    def __init__(self, plan: Plan, replica: int, num_samples: int, consumed: int) -> None:
        self.replica = replica
        self.global_batch_size = global_batch_size(plan)
        counts = [r.num_micro_batches for r in plan.replicas]
        self._batches = deal(counts, micro_batch_sizes(plan))[replica]
        self._starts = range(
            consumed, num_samples - self.global_batch_size + 1, self.global_batch_size
        )

    def __len__(self) -> int:
        return len(self._starts) * len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        for start in self._starts:
            for batch in self._batches:
                yield [start + sample for sample in batch]


class NoData:
    """The iterator of a rank that reads nothing."""

    def __iter__(self) -> NoData:
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError("a rank that is neither on a first nor on a last stage asked for data")


def reads_data(groups: RankGroups) -> bool:
    """First stages read the tokens, last stages the labels; one rank of the group for all."""
    at_an_end = groups.pipeline.stage == 0 or groups.is_last_stage
    return at_an_end and groups.tensor.rank() == 0


def iterators_provider(
    datasets_provider: Callable[..., tuple[Dataset | None, ...]], plan: Plan, groups: RankGroups
) -> EveryRankProvider:
    """Turn a provider of datasets into Megatron's provider for `--dataloader-type external`.

    The datasets are Megatron's; only the choice of samples is ours.
    """
    from megatron.training import get_args

    def provide(num_samples: Any) -> tuple[Any, ...]:
        args = get_args()
        consumed = (args.consumed_train_samples, args.consumed_valid_samples, 0)
        loaders: list[Any] = []
        for dataset, start in zip(datasets_provider(num_samples), consumed, strict=True):
            # Megatron asks rank 0, which has all datasets, what there is to train and validate on.
            if dataset is None or not reads_data(groups):
                decides = reads_data(groups) or torch.distributed.get_rank() == 0
                loaders.append(None if dataset is None and decides else NoData())
                continue
            sampler = ReplicaSampler(plan, groups.position.replica, len(dataset), start)
            loader = DataLoader(
                dataset,
                batch_sampler=sampler,
                num_workers=args.num_workers,
                pin_memory=torch.cuda.is_available(),
                persistent_workers=args.num_workers > 0,
            )
            loaders.append(iter(loader))
        return tuple(loaders)

    return EveryRankProvider(provide)
