"""Start of the ranks of dealt steps, and their records beside the prediction.

The ranks know of the prediction only what a pass takes (`sequences.pipelines`); order, messages and
waits are those of the training itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import UsageError
from megatron_hetero.lab.rehearse.capacity import check_capacity
from megatron_hetero.lab.rehearse.clock import now
from megatron_hetero.lab.rehearse.dealt.rank import DealtRank, SmallTokens
from megatron_hetero.lab.rehearse.links.board import Board
from megatron_hetero.lab.rehearse.links.network import Network
from megatron_hetero.lab.rehearse.pace import (
    MOST_TRIES,
    WARMUP_STEPS,
    RehearsalDone,
    read_records,
)
from megatron_hetero.lab.rehearse.progress import StepProgress, progress_words
from megatron_hetero.lab.rehearse.run import TIMEOUT_S, RehearsalOptions
from megatron_hetero.lab.verify.small.shrink import Shrunk, shrink
from megatron_hetero.lab.verify.small.text import tokenizer_arguments
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.steps import job_of
from megatron_hetero.runtime.sequences.balance import balance, slowest_of_each
from megatron_hetero.sequences.deal.dealt import check_lengths
from megatron_hetero.sequences.lengths import Lengths
from megatron_hetero.sequences.replica_groups import ReplicaGroups
from megatron_hetero.sequences.simulated_step import SimulatedStep

_MOST_TOKENS = 256
"""Length of the longest sequence in the small model: a pass takes milliseconds here."""
_SMALL_ELEMENT_BYTES = 4
_SLOTS = 24
"""On the board, for each micro-batch of a rank: its passes, messages and their shapes."""


@dataclass(frozen=True)
class DealtJob:
    """A job of dealt sequences: `plan` and `groups` on `cluster`, which `cluster_file` describes;
    its documents have `lengths`."""

    cluster: Cluster
    cluster_file: Path
    workload: Workload
    plan: Plan
    groups: ReplicaGroups
    lengths: Lengths


@dataclass(frozen=True)
class DealtStepSeen:
    """One step: seconds of the cluster, predicted and rehearsed, up to the last backward pass, and
    the busiest replica over the mean."""

    predicted_s: float
    rehearsed_s: float
    num_sequences: int
    num_tokens: int
    groups: str
    predicted_balance: float
    rehearsed_balance: float

    @property
    def error(self) -> float:
        """Return predicted over rehearsed, minus 1."""
        return self.predicted_s / self.rehearsed_s - 1


@dataclass(frozen=True)
class DealtRehearsal:
    """The steps that count; of `num_disturbed` this machine did not keep pace."""

    steps: tuple[DealtStepSeen, ...]
    time_scale: float
    num_disturbed: int
    largest_lag_s: float

    @property
    def error(self) -> float:
        """Return the median of the steps' errors."""
        return median(step.error for step in self.steps)


def rehearse_deals(
    job: DealtJob,
    options: RehearsalOptions,
    folder: Path,
    on_progress: Callable[[str], None] = lambda words: None,
) -> DealtRehearsal:
    """Run dealt steps and compare each with its prediction.

    Args:
        job: the job.
        options: steps, time scale and faults.
        folder: folder for everything that the processes write.
        on_progress: called with the state of the rehearsal, in words.
    Raises:
        EnvironmentMismatchError: there are more ranks than this machine can rehearse.
        InfeasiblePlanError: the longest sequence is longer than any group can hold.
        UsageError: a fault names a rank that does not exist, or no message is there to slow down.
        RankFailedError: a process failed.
    """
    # Refuse what cannot be rehearsed.
    table = rank_table(job.plan)
    check_capacity(len(table))
    for rank in options.slow_ranks:
        if not 0 <= rank < len(table):
            raise UsageError(f"--slow-rank {rank}: the job has ranks 0 to {len(table) - 1}")
    if options.slow_links and all(len(r.stages) == 1 for r in job.plan.replicas):
        raise UsageError(
            "--slow-link: no replica has several stages, so no message goes between them; what "
            "members of a group exchange is in the price of their passes"
        )
    # No document may be longer than any group holds.
    longest = job.lengths.longest
    check_lengths(job.groups.tree, [longest], [f"the longest sequence of {job.lengths.source}"])
    # Write the documents, run the ranks, gather their records.
    ranks = _Ranks(job, options, folder.resolve())
    on_progress("writing the data set")
    run_jobs([ranks.documents_job()], TIMEOUT_S)

    def on_poll() -> None:
        state = ranks.progress.state()
        on_progress(progress_words(state, len(table), options.steps, ranks.typical_s(), now()))

    run_jobs([ranks.ranks_job()], TIMEOUT_S, on_poll)
    records = [read_records(ranks.record(rank)) for rank in range(len(table))]
    return _gathered(records, [place.replica for place in table])


class _Ranks:
    """The processes of a rehearsal."""

    def __init__(self, job: DealtJob, options: RehearsalOptions, folder: Path) -> None:
        self._job, self._options, self._folder = job, options, folder
        training = job.workload.training
        self._num_steps = WARMUP_STEPS + MOST_TRIES * options.steps
        self._batch = training.global_batch_size
        self._small: Shrunk = shrink(job.plan, job.workload)
        self._table = rank_table(job.plan)
        # The described links between the ranks, and room for all that ranks announce to each other.
        known = {device.name: device for device in job.cluster.devices}
        devices = [known[place.device or ""] for place in self._table]
        self._network = Network(job.cluster, devices, options.slow_links)
        slots = self._num_steps * self._batch * len(self._table) * _SLOTS
        self._board = Board(len(self._network.path_names), slots)
        # Bytes of a real token for each byte of a small one: hidden sizes and precisions differ.
        real, small = job.workload.model.hidden_size, self._small.model.hidden_size
        self._tokens = SmallTokens(
            -(-job.lengths.longest // _MOST_TOKENS),
            real * training.element_bytes / (small * _SMALL_ELEMENT_BYTES),
        )
        self.progress = StepProgress()
        self._typical_s = 0.0

    def record(self, rank: int) -> Path:
        """Return the path of a rank's record."""
        return self._folder / "ranks" / f"record-{rank}.json"

    def typical_s(self) -> float:
        """Return the predicted seconds of a step like those of the job."""
        if not self._typical_s:
            from megatron_hetero.sequences.deal.batch import deal_batch
            from megatron_hetero.sequences.step_tokens import step_tokens

            tree, lengths = self._job.groups.tree, self._job.lengths.batch(self._batch, 0)
            step = step_tokens(tree, lengths, deal_batch(tree, lengths))
            self._typical_s = SimulatedStep(step, self._job.groups.pipelines).seconds
        return self._typical_s

    def documents_job(self) -> LocalJob:
        """Return the job of the data set; a process of its own, as torch's threads forbid forks."""

        def write(rank: int) -> None:
            import torch
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

            builder = IndexedDatasetBuilder(str(self._text) + ".bin", dtype=DType.optimal_dtype(2))
            # Lengths decide, tokens do not: zeros for all steps, in the order of the draw.
            for length in self._job.lengths.batch(self._batch * self._num_steps, 0):
                builder.add_item(torch.zeros(length, dtype=torch.int64))
                builder.end_document()
            builder.finalize(str(self._text) + ".idx")

        return LocalJob("data set", 1, write, self._folder / "text-run")

    @property
    def _text(self) -> Path:
        return self._folder / "documents"

    def ranks_job(self) -> LocalJob:
        """Return the job of dealt steps, through the entry that users run."""
        plan_file = self._folder / "plan.json"
        save_plan(self._small.plan, plan_file)
        argv = (
            *self._small.model_args,
            *self._small.plan_args,
            *tokenizer_arguments(self._text),
            "--hetero-sequences=flexible",
            f"--hetero-cluster={self._job.cluster_file}",
            f"--hetero-plan={plan_file}",
            f"--max-position-embeddings={self._job.workload.model.max_position_embeddings}",
            f"--data-cache-path={self._folder / 'cache'}",
            f"--train-iters={self._num_steps}",
            "--optimizer=adam",
            "--lr=1e-4",
            "--lr-decay-style=constant",
            "--log-interval=1",
            "--eval-iters=0",
            "--eval-interval=1000000",
            "--num-workers=0",
            "--distributed-timeout-minutes=20",
            "--hetero-stall-limit=0",
        )

        def train(rank: int) -> None:
            watched = self._rank(rank)
            # Hooks are put in after the fork, so that the parent's functions stay as they are.
            watched.install()
            with suppress(RehearsalDone):
                entry.train(job_of(argv), watched)
            watched.pace.save(self.record(rank))

        return LocalJob("rehearsal", len(self._table), train, self._folder / "ranks")

    def _rank(self, rank: int) -> DealtRank:
        return DealtRank(
            rank,
            self._table[rank],
            self._job.groups,
            self._tokens,
            self._board,
            self._network,
            self._options.steps,
            self._options.time_scale,
            self._options.slow_ranks.get(rank, 1.0),
            self.progress if rank == 0 else None,
        )


def _gathered(
    records: Sequence[Sequence[Mapping[str, Any]]], replicas: Sequence[int]
) -> DealtRehearsal:
    """Combine the records of the ranks, [rank][step] as `StepPace.records`."""
    # Steps in which no rank fell behind; all steps if there are none.
    tried = range(len(records[0]))
    kept = [step for step in tried if not any(rank[step]["is_disturbed"] for rank in records)]
    steps = kept or list(tried)
    return DealtRehearsal(
        tuple(_seen([rank[step] for rank in records], replicas) for step in steps),
        float(records[0][steps[-1]]["scale"]),
        len(tried) - len(kept),
        max(rank[step]["largest_lag_s"] for rank in records for step in steps),
    )


def _seen(ranks: Sequence[Mapping[str, Any]], replicas: Sequence[int]) -> DealtStepSeen:
    # Seconds of passes of each rank.
    busy_s = [sum(end_s - start_s for *_, start_s, end_s in rank["spans"]) for rank in ranks]
    first = ranks[0]
    return DealtStepSeen(
        first["predicted_s"],
        max(rank["end_s"] for rank in ranks) / first["scale"],
        first["num_sequences"],
        first["num_tokens"],
        first["sizes"],
        balance(first["predicted_busy_s"]),
        balance(slowest_of_each(busy_s, replicas)),
    )
