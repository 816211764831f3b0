"""Processes of a verification, all started from the same seed checkpoint of stock Megatron.

They share one data set of real text and one set of flags. The one process runs stock `pretrain`
without any group, sync, schedule, loss or data code of ours (`processes.one_process`); the plan
runs through `entry.main`, as a user's job does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_hetero.lab.verify.faults import catalogue
from megatron_hetero.lab.verify.options import precision_flags
from megatron_hetero.lab.verify.processes import one_process
from megatron_hetero.lab.verify.processes.casts import Casts, casts_of
from megatron_hetero.lab.verify.processes.floor import FloorRecorder
from megatron_hetero.lab.verify.processes.optimizer_flags import ONLY_WITH_ADAM, RATES
from megatron_hetero.lab.verify.processes.recorder import DrawingRecorder, Recorder
from megatron_hetero.lab.verify.processes.routing import Replay, Routers, replay_of_rank
from megatron_hetero.lab.verify.processes.run_flags import RunFlags
from megatron_hetero.lab.verify.small.job_flags import PRECISIONS, without_flags
from megatron_hetero.lab.verify.small.shrink import Shrunk
from megatron_hetero.lab.verify.small.text import write_text_dataset
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.precision import narrowest
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.megatron import checkpoint_metadata
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from megatron_hetero.runtime.parallel.pipeline import always_send_parts
from megatron_hetero.runtime.transformer_engine import layers
from megatron_hetero.schedule.stock import is_stock

_SAVED = "latest_checkpointed_iteration.txt"
"""The file that Megatron writes last of a checkpoint."""


class VerifyJobs(RunFlags):
    """Jobs of a verification, with common flags, data and seed checkpoint."""

    def seed_job(self) -> LocalJob:
        """Return the job in which stock Megatron makes the initial weights of every run."""
        # One step without a rate: Megatron saves the weights that it has drawn.
        argv = (
            *without_flags(self._model_arguments(self.options.precision, False), RATES),
            *self._one_process,
            "--train-iters=1",
            "--lr=0",
            f"--data-cache-path={self._folder / 'seed-run' / 'cache'}",
            f"--save={self._seed}",
            "--save-interval=1",
            "--no-save-optim",
            "--no-save-rng",
        )

        shares = any(s.shares for r in self.shrunk.plan.layout.replicas for s in r.stages)

        def seed(rank: int) -> None:
            # Weights and text of a run before this one serve again.
            if self.options.reuses and (self._seed / _SAVED).exists():
                return
            write_text_dataset(self._text, self._num_tokens)
            save_without_a_server()
            if shares:
                # Uneven pieces of the stacked tensors that stock GPT writes cannot be read.
                checkpoint_metadata.apply()
            one_process.train(argv, entry.World.from_environment().store())

        return LocalJob("seed checkpoint", 1, seed, self._folder / "seed-run")

    def reference_job(self, optimizer: str) -> LocalJob:
        """Return the job of the one process of stock Megatron (`processes.one_process`)."""
        replays = self.replays_routing(optimizer)
        return self._one_process_job(
            "reference",
            optimizer,
            lambda: DrawingRecorder(Routers() if replays else None),
            casts=self._casts(optimizer),
        )

    def _casts(self, optimizer: str, is_reversed: bool = False) -> Casts | None:
        if not self.mixes_precisions(optimizer):
            return None
        plan, job = self.plan_of(optimizer), self.options.precision_of(optimizer)
        return casts_of(plan, job, self.shrunk.micro_batch_size, is_reversed)

    def _routing(self, optimizer: str) -> Path:
        """Return the path of the one-process record with the expert choices."""
        return self._folder / optimizer / "reference" / "record-0.safetensors"

    def floor_job(self, optimizer: str) -> LocalJob:
        """Return the job of the one process in another rounding (`FloorRecorder`)."""
        return self._one_process_job(
            "floor",
            optimizer,
            lambda: FloorRecorder(self.shrunk),
            casts=self._casts(optimizer, is_reversed=True),
        )

    def fp32_job(self, optimizer: str, skipped: Sequence[int]) -> LocalJob:
        """Return the one-process job in fp32, without the steps skipped by half precision."""
        flags: tuple[str, ...] = ()
        # The flag counts steps from 0.
        if skipped:
            flags = ("--iterations-to-skip", *(str(step - 1) for step in skipped))

        def recorder() -> Recorder:
            # In fp32 the one process follows its own choices of half precision.
            if not self.replays_routing(optimizer):
                return Recorder()
            count = sum(r.num_micro_batches for r in self.shrunk.plan.replicas)
            whole = Replay(self._routing(optimizer), tuple(range(count)), count)
            return Recorder(Routers(whole))

        return self._one_process_job("fp32", optimizer, recorder, flags, in_fp32=True)

    def _one_process_job(
        self,
        name: str,
        optimizer: str,
        make: Callable[[], Recorder],
        flags: Sequence[str] = (),
        in_fp32: bool = False,
        casts: Casts | None = None,
    ) -> LocalJob:
        # Where the run casts, the flag of precision is the optimizer's alone.
        folder = self._folder / optimizer / name
        of_optimizer: tuple[str, ...] = ()
        if casts is not None:
            of_optimizer = precision_flags(narrowest(self.precisions_of(optimizer)))
        given = self.training_arguments(optimizer, in_fp32)
        argv = (
            *(without_flags(given, PRECISIONS) if of_optimizer else given),
            *of_optimizer,
            *self._one_process,
            *flags,
            f"--data-cache-path={folder / 'cache'}",
        )

        def train(rank: int) -> None:
            if self.options.reuses and (folder / f"record-{rank}.json").exists():
                return
            # Errors in code that both runs use are planted in both.
            catalogue.plant_in_one_process(self.options.fault)
            recorder = make()
            one_process.train(argv, entry.World.from_environment().store(), recorder, casts)
            recorder.save(folder / f"record-{rank}")

        return LocalJob(f"one process, {optimizer}", 1, train, folder)

    def plan_job(self, optimizer: str) -> LocalJob:
        """Return the job of the plan, through the entry that users run."""
        arguments = self.training_arguments(optimizer)
        shrunk = replace(self.shrunk, plan=self.plan_of(optimizer))
        return self._plan_job("the plan", optimizer, shrunk, arguments)

    def plan_jobs(self, optimizer: str) -> tuple[LocalJob, ...]:
        """Return the jobs of the plan, to be run one after the other: one, or two where its
        processes end after a checkpoint and others go on from there."""
        if not self.options.resumes(optimizer):
            return (self.plan_job(optimizer),)
        shrunk = replace(self.shrunk, plan=self.plan_of(optimizer))
        return self.interrupted_jobs(optimizer, shrunk, self.options.resumes_after)

    def interrupted_jobs(
        self, optimizer: str, resumed: Shrunk, after: int
    ) -> tuple[LocalJob, LocalJob]:
        """Return the plan's job up to a checkpoint, and `resumed`'s from there to the end.

        Args:
            optimizer: "sgd" or "adam".
            resumed: the same model under a plan that may be another, also stock Megatron's.
            after: the step after which the first job saves and exits.
        """
        checkpoints = self._folder / optimizer / "checkpoints"
        saving = (f"--save={checkpoints}", "--save-interval=1000")
        given = (*self.training_arguments(optimizer), *saving)
        # The second job loads the first one's checkpoint, optimizer included, and not the seed.
        start = ("--load=", "--finetune", "--no-load-optim")
        going_on = tuple(flag for flag in given if not flag.startswith(start))
        return (
            self._plan_job(
                "the plan",
                optimizer,
                replace(self.shrunk, plan=self.plan_of(optimizer)),
                (*given, f"--exit-interval={after}"),
            ),
            self._plan_job(
                "the resumed plan",
                optimizer,
                resumed,
                (*going_on, *resumed.model_args, f"--load={checkpoints}"),
            ),
        )

    def _plan_job(
        self, name: str, optimizer: str, shrunk: Shrunk, arguments: tuple[str, ...]
    ) -> LocalJob:
        folder = self._folder / optimizer / name.removeprefix("the ").replace(" ", "-")
        argv = (
            *arguments,
            _plan_flag(shrunk.plan, folder / "plan.json"),
            *self._flags_of_the_plan(shrunk, optimizer),
            f"--data-cache-path={folder / 'cache'}",
        )

        def train(rank: int) -> None:
            # A fault is planted in the forked ranks, before the entry takes hold of anything.
            always_send_parts()
            here = layers.gpu_flags(argv) if backend.cuda_is_usable() else ()
            if self.options.fault is not None:
                catalogue.plant(self.options.fault)
            save_without_a_server()
            mixes = self.mixes_precisions(optimizer)
            recorder = Recorder(self._replayed(shrunk, optimizer, rank), records_main=mixes)
            # The record is written before the process may leave.
            leaving = None
            try:
                entry.main((*argv, *here), recorder)
            except SystemExit as left:
                # Megatron ends a run at `--exit-interval` by leaving the process.
                leaving = left
            recorder.save(folder / f"record-{rank}")
            if leaving is not None:
                raise leaving

        return LocalJob(f"{name}, {optimizer}", shrunk.plan.layout.num_devices, train, folder)

    def _replayed(self, shrunk: Shrunk, optimizer: str, rank: int) -> Routers | None:
        if not self.replays_routing(optimizer) or not self._routing(optimizer).exists():
            return None
        replay = replay_of_rank(
            shrunk.plan,
            rank,
            shrunk.micro_batch_size,
            self._routing(optimizer),
            shrunk.model.seq_length,
        )
        return Routers(replay)

    def _flags_of_the_plan(self, shrunk: Shrunk, optimizer: str) -> tuple[str, ...]:
        given = (*shrunk.plan_args, *self._flags.plan, *self.options.plan_flags)
        # Stock Megatron has a divided optimizer for Adam only.
        if optimizer != "sgd" or not is_stock(shrunk.plan):
            return given
        return without_flags(given, ONLY_WITH_ADAM)


def _plan_flag(plan: Plan, path: Path) -> str:
    # A plan that its layout says in full needs no file.
    if plan == plan_from_layout(plan.layout):
        return f"--hetero-layout={format_layout(plan.layout)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_plan(plan, path)
    return f"--hetero-plan={path}"
