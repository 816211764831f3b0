"""Which samples each replica reads: the global batch is the one a single process would take.

Step k of the job covers samples `k*B .. (k+1)*B - 1` of the dataset, in order.  Replica r takes a
contiguous run of it, as long as its part of the micro-batches.  Ranks that read nothing (inner
stages, all but the first of a tensor-parallel group) get an iterator that says so if it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from megatron_hetero.plan.plan import Plan, Replica
from megatron_hetero.runtime.groups import RankGroups
from megatron_hetero.runtime.provider import EveryRankProvider


class ReplicaSampler(Sampler[list[int]]):
    """Batches of sample numbers for one replica, from `consumed_samples` on, without an end batch
    that is not whole."""

    def __init__(
        self, plan: Plan, replica: int, job_micro_batch_size: int, num_samples: int, consumed: int
    ) -> None:
        def size(r: Replica) -> int:
            return r.num_micro_batches * (r.micro_batch_size or job_micro_batch_size)

        self._own = plan.replicas[replica]
        self._micro_batch_size = self._own.micro_batch_size or job_micro_batch_size
        self._first = sum(size(r) for r in plan.replicas[:replica])
        self._global_batch_size = sum(size(r) for r in plan.replicas)
        self._num_samples = num_samples
        self._consumed = consumed

    def __len__(self) -> int:
        steps = (self._num_samples - self._consumed) // self._global_batch_size
        return steps * self._own.num_micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        start = self._consumed
        while start + self._global_batch_size <= self._num_samples:
            for i in range(self._own.num_micro_batches):
                first = start + self._first + i * self._micro_batch_size
                yield list(range(first, first + self._micro_batch_size))
            start += self._global_batch_size


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
            if not reads_data(groups):
                loaders.append(NoData())
                continue
            if dataset is None:
                loaders.append(None)
                continue
            sampler = ReplicaSampler(
                plan, groups.position.replica, args.micro_batch_size, len(dataset), start
            )
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
