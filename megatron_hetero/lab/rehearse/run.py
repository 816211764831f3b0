"""Start of a rehearsal's ranks, and collection of their records beside the prediction.

The ranks know nothing of the simulation: each gets the seconds of its own passes and the
description of the links. Order, messages and waits are those of Megatron and of our runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from megatron_hetero.bounds.estimate import workload_of
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import InfeasiblePlanError, UnsupportedError, UsageError
from megatron_hetero.lab.rehearse.capacity import check_capacity
from megatron_hetero.lab.rehearse.clock import now
from megatron_hetero.lab.rehearse.links.board import Board
from megatron_hetero.lab.rehearse.links.network import Network, SlowLink
from megatron_hetero.lab.rehearse.pace import (
    MOST_TRIES,
    WARMUP_STEPS,
    RankTimes,
    RehearsalDone,
    read_records,
)
from megatron_hetero.lab.rehearse.progress import StepProgress, progress_words
from megatron_hetero.lab.rehearse.rank import RehearsedRank
from megatron_hetero.lab.rehearse.rehearsal import Rehearsal, gather
from megatron_hetero.lab.rehearse.small import SmallModel, small_model
from megatron_hetero.lab.verify.small.text import tokenizer_arguments, write_text_dataset
from megatron_hetero.plan.checks.estimates import estimates_are_possible
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.steps import job_of
from megatron_hetero.runtime.transformer_engine import layers
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.exchange.stock_buckets import stock_bucket_elements
from megatron_hetero.schedule.simulator.stage_times import plan_times
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import is_stock, sends_as_stock

TIMEOUT_S = 1800.0
"""Limit on the whole rehearsal, and on each phase of its stretched steps."""


@dataclass(frozen=True)
class RehearsalOptions:
    """Options of a rehearsal.

    `slow_ranks` maps a rank to the factor by which it computes slower than predicted.
    `rehearsed_plan` replaces the plan in the rehearsal only, not in the prediction.
    """

    steps: int = 3
    time_scale: float | None = None
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    slow_links: tuple[SlowLink, ...] = ()
    rehearsed_plan: Plan | None = None


def rehearse(
    plan: Plan,
    cluster: Cluster,
    profile: Profile | None,
    options: RehearsalOptions,
    folder: Path,
    on_progress: Callable[[str], None] = lambda words: None,
) -> Rehearsal:
    """Run a plan and compare the run with the prediction.

    Both take links as latency and bandwidth only (`Link.terms`).

    Args:
        plan: a plan with devices and a workload, valid on `cluster`.
        cluster: the cluster to imitate.
        profile: measured times of its GPUs; without one the catalogue answers.
        options: steps, time scale and faults.
        folder: folder for everything that the processes write.
        on_progress: called with the state of the rehearsal, in words.
    Raises:
        EnvironmentMismatchError: there are more ranks than this machine can rehearse.
        UsageError: a fault names a rank or a node that does not exist.
        InfeasiblePlanError: a GPU has too little memory for its stage.
        UnsupportedError: the plan has sharded layers, or shrinks to a plan of another kind.
        RankFailedError: a process failed.
    """
    stock, cluster = sends_as_stock(plan), cluster.without_link_terms
    # Refuse what cannot be rehearsed.
    played = options.rehearsed_plan or plan
    if played.layout.has_sharded_layers:
        raise UnsupportedError(
            "the plan has sharded layers (z), whose messages a rehearsal does not make yet. "
            "Rehearse it without them, and simulate this one."
        )
    if plan.workload is not None and plan.workload.training.waits_for_receivers:
        raise UnsupportedError(
            "the plan is priced for a trainer that sends by rendezvous (--sends), and a rehearsal "
            "runs this project's runtime or stock Megatron. Give --sends as-run or buffered."
        )
    # The prediction, before any process is started; new weights are waited for, as in the run.
    trained = workload_of(plan)
    waits = replace(trained, training=replace(trained.training, overlap_param_gather=False))
    predicted = simulate_plan(plan, cluster, waits, profile)
    table = rank_table(played)
    check_capacity(len(table))
    for rank in options.slow_ranks:
        if not 0 <= rank < len(table):
            raise UsageError(f"--slow-rank {rank}: the plan has ranks 0 to {len(table) - 1}")
    # The described links between the ranks.
    known = {device.name: device for device in cluster.devices}
    devices = [known[position.device or ""] for position in table]
    network = Network(cluster, devices, options.slow_links)
    job = _RehearsalJob(played, cluster, profile, options, network, folder.resolve())
    # Sequences that stock Megatron divides with Transformer Engine the plug-in divides here.
    divides = played.layout.has_context_parallel
    if not divides and is_stock(job.small.shrunk.plan) != is_stock(played):
        raise UnsupportedError(
            "shrinking the model changes whether stock Megatron runs the plan; rehearse another"
        )
    # Write the data, run the ranks, gather their records.
    on_progress("writing the data set")
    run_jobs([job.text_job()], TIMEOUT_S)

    def on_poll() -> None:
        state = job.progress.state()
        on_progress(progress_words(state, len(table), options.steps, predicted.step_time_s, now()))

    run_jobs([job.ranks_job()], TIMEOUT_S, on_poll)
    records = [read_records(job.record(rank)) for rank in range(len(table))]
    found = gather(played, predicted, records, stock, network.between_nodes)
    return replace(found, layers=layers.said(layer_flags(played)))


def layer_flags(plan: Plan) -> tuple[str, ...]:
    """Return the flag of the layers that a plan's job names; local ones where orders or shares of
    the plan need them, and its job brings no flags that say."""
    named = layers.names(plan.workload.megatron_args if plan.workload is not None else ())
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    is_split = any("W" in (stage.order or "") for stage in stages)
    if is_split or plan.layout.has_uneven_context_parallel:
        named = layers.LOCAL
    return (f"--transformer-impl={named}",)


class _RehearsalJob:
    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        profile: Profile | None,
        options: RehearsalOptions,
        network: Network,
        folder: Path,
    ) -> None:
        assert plan.workload is not None  # `simulate_plan` has refused it
        self._plan, self._options, self._network = plan, options, network
        self._folder = folder
        self.small: SmallModel = small_model(plan, plan.workload)
        self._times = plan_times(plan, cluster, profile)
        # The room for gradients under way is that of the real model (`runtime.gradients.room`).
        found = plan.estimates or estimate_plan(plan, cluster, profile, bounded=False)
        for fault in estimates_are_possible(replace(plan, estimates=found)):
            raise InfeasiblePlanError(fault.message)
        self._estimates = replace(found, measured=False)
        self._text = folder / "text"
        self._num_steps = WARMUP_STEPS + MOST_TRIES * options.steps
        self._table = rank_table(plan)
        # Slots of shared memory for all messages, passes and collectives of all steps.
        messages = sum(
            replica.num_micro_batches
            * 2
            # Context-parallel ranks have two parts of a sequence each.
            * sum(
                a.shape.num_devices * min(2, a.shape.context_parallel)
                + b.shape.num_devices * min(2, b.shape.context_parallel)
                for a, b in pairwise(replica.stages)
            )
            for replica in plan.replicas
        )
        passes = 3 * sum(r.num_micro_batches * len(r.stages) for r in plan.replicas)
        slots = 2 * self._num_steps * (2 * messages + passes + 64 * len(self._table))
        self._board = Board(len(network.path_names), slots)
        self.progress = StepProgress()

    def record(self, rank: int) -> Path:
        """Return the path of a rank's record."""
        return self._folder / "ranks" / f"record-{rank}.json"

    def text_job(self) -> LocalJob:
        """Return the job of the data set; a process of its own, as torch's threads forbid forks."""
        shrunk = self.small.shrunk
        num_samples = 2 * (self._num_steps + 1) * shrunk.global_batch_size
        num_tokens = num_samples * (shrunk.model.seq_length + 1)

        def write(rank: int) -> None:
            write_text_dataset(self._text, num_tokens)

        return LocalJob("data set", 1, write, self._folder / "text-run")

    def ranks_job(self) -> LocalJob:
        """Return the job of the plan, through the entry that users run."""
        plan_file = self._folder / "plan.json"
        save_plan(replace(self.small.shrunk.plan, estimates=self._estimates), plan_file)
        argv = (
            *self.small.shrunk.model_args,
            *self.small.shrunk.plan_args,
            *layer_flags(self._plan),
            *self._overlap_arguments(),
            *tokenizer_arguments(self._text),
            f"--hetero-plan={plan_file}",
            f"--data-cache-path={self._folder / 'cache'}",
            f"--train-iters={self._num_steps}",
            "--optimizer=adam",
            "--lr=1e-4",
            "--lr-decay-style=constant",
            "--clip-grad=1.0",
            "--log-interval=1",
            "--eval-iters=0",
            "--eval-interval=1000000",
            "--num-workers=0",
            "--distributed-timeout-minutes=20",
            # A stretched phase may last minutes without standing still; the job has a limit.
            f"--hetero-stall-limit={TIMEOUT_S:.0f}",
        )

        def train(rank: int) -> None:
            watched = self._rank(rank)
            watched.install()
            with suppress(RehearsalDone):
                entry.train(job_of(argv, in_our_runtime=not sends_as_stock(self._plan)), watched)
            watched.pace.save(self.record(rank))

        return LocalJob("rehearsal", len(self._table), train, self._folder / "ranks")

    def _overlap_arguments(self) -> tuple[str, ...]:
        """Return flags that divide stock Megatron's buffer as in the real job."""
        workload = self._plan.workload
        if workload is None or not workload.training.overlap_grad_reduce:
            return ()
        # As many small elements as a real bucket has, so that the number of buckets stays.
        bucket = stock_bucket_elements(len(self._plan.replicas))
        return "--overlap-grad-reduce", f"--ddp-bucket-size={self.small.elements_of(bucket)}"

    def _rank(self, rank: int) -> RehearsedRank:
        place = self._table[rank]
        times = self._times[place.replica][place.stage]
        factor = self._options.slow_ranks.get(rank, 1.0)
        # Ranks that compute together: the tensor- and context-parallel group of the stage.
        same_stage = [
            r
            for r, p in enumerate(self._table)
            if (p.replica, p.stage) == (place.replica, place.stage)
        ]
        return RehearsedRank(
            rank,
            RankTimes(
                # The fault slows this rank alone; the prediction does not know of it.
                tuple(chunk.slower(factor) for chunk in times.chunks),
                times.update_s * factor,
                self._plan.replicas[place.replica].num_micro_batches,
                times.last_backward and times.last_backward.slower(factor),
            ),
            self.small,
            self._board,
            self._network,
            same_stage,
            self._options.steps,
            self._options.time_scale,
            self.progress if rank == 0 else None,
        )
