"""Samples that each replica reads: the global batch is the one a single process would take.

Step k of the job covers samples `k*B .. (k+1)*B - 1` in one process's order of the dataset. Its
micro-batches are dealt out in rounds, one to each replica that still has some to run, in that
order; with equal counts that is Megatron's own division among data-parallel ranks. Ranks that read
nothing (inner stages, all but the first of a tensor-parallel group) get an iterator that raises an
error when asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.batches import (
    BatchSchedule,
    deal,
    global_batch_size,
    micro_batch_sizes,
)
from megatron_hetero.runtime.model.samples.datasets import every_stage_reads
from megatron_hetero.runtime.model.samples.provider import EveryRankProvider
from megatron_hetero.runtime.parallel.groups import RankGroups


@dataclass(frozen=True)
class Order:
    """Order in which a single process reads a dataset of `num_samples`, and the end of the order.

    With `shuffled_by`, a micro-batch size, the order is endless: each epoch is permuted by a state
    seeded with its number, without the samples that fill no micro-batch, as
    `MegatronPretrainingRandomSampler` does on one data-parallel rank (`--dataloader-type cyclic`).
    Without, each sample is read once, in order, as by `MegatronPretrainingSampler`.
    """

    num_samples: int
    shuffled_by: int | None = None

    @property
    def end(self) -> int | None:
        """Return the number of positions; None for no end."""
        return None if self.shuffled_by else self.num_samples

    def sample(self, position: int) -> int:
        """Return the dataset index of the sample read at `position`."""
        if self.shuffled_by:
            whole = self.num_samples - self.num_samples % self.shuffled_by
            epoch, place = divmod(position, whole)
            return _permutation(whole, epoch)[place]
        return position


@lru_cache(maxsize=4)
def _permutation(length: int, epoch: int) -> list[int]:
    generator = torch.Generator()
    generator.manual_seed(epoch)
    return torch.randperm(length, generator=generator).tolist()


class ReplicaSampler(Sampler[list[int]]):
    """Sampler of batches of sample numbers for one replica, from `consumed` samples on.

    The end of the dataset that is no whole global batch is left out.
    """

    def __init__(self, batches: BatchSchedule, replica: int, order: Order, consumed: int) -> None:
        self.replica = replica
        self.global_batch_size = global_batch_size(batches.plans[-1])
        self._batches = batches
        # Global batch size -> this replica's micro-batches, numbered from the batch's first sample.
        self._dealt = {
            global_batch_size(plan): deal(
                [r.num_micro_batches for r in plan.replicas], micro_batch_sizes(plan)
            )[replica]
            for plan in batches.plans
        }
        self._order, self._consumed = order, consumed

    def __iter__(self) -> Iterator[list[int]]:
        start, end = self._consumed, self._order.end
        while True:
            # Batches may grow: the samples consumed so far say which batch is due.
            size = global_batch_size(self._batches.plan_at(start))
            if end is not None and start + size > end:
                return
            for batch in self._dealt[size]:
                yield [self._order.sample(start + sample) for sample in batch]
            start += size


class WholeSet(Dataset):
    """A dataset filled up to whole global batches with samples that do not count.

    It serves `--full-validation`, which sees each sample once: the loss mask of the filling samples
    is zero.
    """

    def __init__(self, dataset: Dataset, batch_size: int) -> None:
        self._dataset = dataset
        self.num_batches = -(-len(dataset) // batch_size)
        self._length = self.num_batches * batch_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if index < len(self._dataset):
            return self._dataset[index]
        # Any sample can fill up, since its mask takes the sample out of the loss.
        filling = self._dataset[0]
        if not isinstance(filling, dict) or "loss_mask" not in filling:
            raise UnsupportedError(
                "--full-validation: the samples of the dataset have no loss_mask, so that nothing "
                "can fill up its last global batch. Leave the flag out, or give them one."
            )
        return {**filling, "loss_mask": torch.zeros_like(filling["loss_mask"])}


class NoData:
    """Iterator of a rank that reads nothing.

    `num_batches` is what Megatron takes for the length of a validation set.
    """

    def __init__(self, num_batches: int = 0) -> None:
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> NoData:
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError("a rank that is neither on a first nor on a last stage asked for data")


class _Validation:
    """Loader of a whole validation set, which Megatron iterates again and again.

    Its length is the number of validation steps that cover it.
    """

    def __init__(self, loader: DataLoader, num_batches: int) -> None:
        self._loader, self._num_batches = loader, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def reads_data(groups: RankGroups) -> bool:
    """Tell if this rank reads data: tokens on first stages, labels on last stages, and on all what
    says where documents begin (`runtime.model.samples.datasets.every_stage_reads`).

    One rank reads for its tensor-parallel group.
    """
    at_an_end = groups.pipeline.stage == 0 or groups.is_last_stage
    return (at_an_end or every_stage_reads()) and groups.tensor.rank() == 0


def iterators_provider(
    datasets_provider: Callable[..., tuple[Any, ...]],
    batches: BatchSchedule,
    groups: RankGroups,
    shuffled_by: int | None = None,
) -> EveryRankProvider:
    """Turn a provider of datasets into Megatron's provider for `--dataloader-type external`.

    The datasets are Megatron's; only the choice of samples is ours.

    Args:
        datasets_provider: provider of the datasets.
        batches: batches of training, and of validation.
        groups: the groups of this rank.
        shuffled_by: the job's micro-batch size, if the user asks for `--dataloader-type cyclic`.
    """
    from megatron.training import get_args

    def provide(num_samples: Any) -> tuple[Any, ...]:
        # Validation has a fixed batch, whatever the batch of training grows to.
        args = get_args()
        last = BatchSchedule.constant(batches.of_validation)
        batch = global_batch_size(batches.of_validation)

        def loader(
            dataset: Dataset, order: Order, consumed: int, batches: BatchSchedule = last
        ) -> DataLoader:
            return DataLoader(
                dataset,
                batch_sampler=ReplicaSampler(batches, groups.position.replica, order, consumed),
                num_workers=args.num_workers,
                pin_memory=torch.cuda.is_available(),
                persistent_workers=args.num_workers > 0,
            )

        def iterator(dataset: Any, consumed: int, batches: BatchSchedule = last) -> Any:
            # Megatron asks rank 0, which has all datasets, what there is to train and validate on.
            if dataset is None or not reads_data(groups):
                decides = reads_data(groups) or torch.distributed.get_rank() == 0
                return None if dataset is None and decides else NoData()
            # From where the job stopped, this replica's part of each global batch.
            order = Order(len(dataset), shuffled_by)
            return iter(loader(dataset, order, consumed, batches))

        # Full validation reads a data set to its end, filled up to whole batches.
        def whole(dataset: Any) -> Any:
            if dataset is None:
                return iterator(None, 0)
            filled = WholeSet(dataset, batch)
            if not reads_data(groups):
                return NoData(filled.num_batches)
            return _Validation(loader(filled, Order(len(filled)), 0), filled.num_batches)

        # Megatron's data sets, wrapped as iterators over our choice of samples.
        train, valid, test = datasets_provider(num_samples)
        if args.full_validation:
            validation = [whole(dataset) for dataset in valid]
        else:
            validation = iterator(valid, consumed_in_validation(args))
        return (
            iterator(train, _consumed_in_phase(args), batches),
            validation,
            iterator(test, 0),
        )

    return EveryRankProvider(provide)


def consumed_in_validation(args: Any) -> int:
    """Count the validation samples that are read already; a job that only evaluates begins with the
    first, as in Megatron, whatever its checkpoint has seen."""
    return 0 if args.skip_train else int(args.consumed_valid_samples)


def _consumed_in_phase(args: Any) -> int:
    """Count the samples read since the start of the current phase; every phase of
    `--phase-transition-iterations` begins anew."""
    if not args.phase_transition_iterations:
        return int(args.consumed_train_samples)
    begun = max(step for step in (0, *args.phase_transition_iterations) if step <= args.iteration)
    return int((args.iteration - begun) * args.global_batch_size)
