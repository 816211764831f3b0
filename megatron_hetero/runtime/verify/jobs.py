"""The processes of one verification, all started from one seed checkpoint of stock Megatron.

They share one data set of real text and one set of flags.  The one process runs stock `pretrain`
with none of our groups, sync, schedule, loss or data code (`verify.one_process`); the plan runs
through `entry.main`, as a user's job does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_hetero.model.spec import Precision
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import entry
from megatron_hetero.runtime.local_launch import Job
from megatron_hetero.runtime.megatron import checkpoint_metadata
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from megatron_hetero.runtime.provider import EveryRankProvider
from megatron_hetero.runtime.verify import faults, one_process
from megatron_hetero.runtime.verify.record import Recorder
from megatron_hetero.runtime.verify.shrink import Shrunk
from megatron_hetero.runtime.verify.text import tokenizer_arguments, write_text_dataset

LEARNING_RATE = {"sgd": 3e-2, "adam": 3e-4}
OPTIMIZERS = tuple(LEARNING_RATE)


def precision_flags(precision: Precision, per_token_loss: bool) -> tuple[str, ...]:
    """Megatron's flags to train in `precision`; the loss scale of fp16 grows within a few steps.

    It starts where the small model's gradients are far from both ends of fp16: a loss per token is
    a sum over the batch, otherwise a mean.
    """
    if precision != "fp16":
        return () if precision == "fp32" else ("--bf16",)
    scale = 2**4 if per_token_loss else 2**12
    return ("--fp16", f"--initial-loss-scale={scale}", "--loss-scale-window=2", "--hysteresis=1")


@dataclass(frozen=True)
class Options:
    """How to verify.

    `optimizers` are trained with one after the other; `fault` names an error of `faults` that is
    planted in the plan's runs.  `plan_flags` are Megatron flags of the plan's runs alone;
    `precision` is that of all runs.
    """

    steps: int = 5
    optimizers: tuple[str, ...] = OPTIMIZERS
    floor: bool = False
    fault: str | None = None
    plan_flags: tuple[str, ...] = ()
    precision: Precision = "fp32"


class VerifyJobs:
    """The jobs of one verification, which share flags, data and the seed checkpoint."""

    def __init__(self, shrunk: Shrunk, options: Options, folder: Path) -> None:
        self.shrunk = shrunk
        self.options = options
        self._folder = folder
        self._text = folder / "text"
        self._seed = folder / "seed"
        # Megatron shuffles samples over whole epochs; a margin keeps all steps in the first one.
        num_samples = 2 * (options.steps + 1) * shrunk.global_batch_size
        self._num_tokens = num_samples * (shrunk.model.seq_length + 1)
        self._common = (
            *tokenizer_arguments(self._text),
            "--lr-decay-style=constant",
            "--weight-decay=0.01",
            "--clip-grad=1.0",
            "--log-interval=1",
            "--eval-iters=0",
            "--eval-interval=1000000",
            "--num-workers=0",
            "--distributed-timeout-minutes=5",
            "--ckpt-format=torch_dist",
        )
        if options.precision != "fp32":
            # Above the rounding of half precision: below it Adam's update is the sign of a gradient
            # that may be nothing but rounding.
            self._common += ("--adam-eps=1e-2",)
        per_token = "--calculate-per-token-loss" in shrunk.model_args
        self._precision = precision_flags(options.precision, per_token)
        self._one_process = (f"--make-vocab-size-divisible-by={shrunk.vocab_multiple}",)

    def _model_arguments(self, in_fp32: bool = False) -> tuple[str, ...]:
        precision = () if in_fp32 else self._precision
        # The model's last, so that a workload's own weight decay or clipping counts.
        return (*self._common, *precision, *self.shrunk.model_args)

    def training_arguments(self, optimizer: str, in_fp32: bool = False) -> tuple[str, ...]:
        return (
            *self._model_arguments(in_fp32),
            f"--train-iters={self.options.steps}",
            f"--optimizer={optimizer}",
            f"--lr={LEARNING_RATE[optimizer]}",
            f"--load={self._seed}",
            "--finetune",
            "--no-load-optim",
            "--no-load-rng",
            "--exit-on-missing-checkpoint",
        )

    def seed_job(self) -> Job:
        """Stock Megatron makes the weights that every run starts from."""
        argv = (
            *self._model_arguments(),
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
            write_text_dataset(self._text, self._num_tokens)
            save_without_a_server()
            if shares:
                # Uneven pieces of the stacked tensors that stock GPT writes cannot be read.
                checkpoint_metadata.apply()
            one_process.train(argv, entry.World.from_environment().store())

        return Job("seed checkpoint", 1, seed, self._folder / "seed-run")

    def reference_job(self, optimizer: str) -> Job:
        """One process of stock Megatron (`verify.one_process`)."""
        return self._one_process_job("reference", optimizer, Recorder)

    def floor_job(self, optimizer: str) -> Job:
        """The same in another rounding (`FloorRecorder`)."""
        return self._one_process_job("floor", optimizer, lambda: FloorRecorder(self.shrunk))

    def fp32_job(self, optimizer: str, skipped: Sequence[int]) -> Job:
        """The same in fp32; it leaves out the steps that half precision has skipped."""
        flags: tuple[str, ...] = ()
        if skipped:
            flags = ("--iterations-to-skip", *(str(step - 1) for step in skipped))
        return self._one_process_job("fp32", optimizer, Recorder, flags, in_fp32=True)

    def _one_process_job(
        self,
        name: str,
        optimizer: str,
        make: Callable[[], Recorder],
        flags: Sequence[str] = (),
        in_fp32: bool = False,
    ) -> Job:
        folder = self._folder / optimizer / name
        argv = (
            *self.training_arguments(optimizer, in_fp32),
            *self._one_process,
            *flags,
            f"--data-cache-path={folder / 'cache'}",
        )

        def train(rank: int) -> None:
            recorder = make()
            one_process.train(argv, entry.World.from_environment().store(), recorder)
            recorder.save(folder / f"record-{rank}")

        return Job(f"one process, {optimizer}", 1, train, folder)

    def plan_job(self, optimizer: str) -> Job:
        """The plan through the entry that users run."""
        arguments = self.training_arguments(optimizer)
        return self._plan_job("the plan", optimizer, self.shrunk, arguments)

    def interrupted_jobs(self, optimizer: str, resumed: Shrunk, after: int) -> tuple[Job, Job]:
        """The plan up to a checkpoint, at which it exits, and `resumed` from there to the end.

        `resumed` is the same model under a plan that may be another; stock Megatron's too.
        """
        checkpoints = self._folder / optimizer / "checkpoints"
        saving = (f"--save={checkpoints}", "--save-interval=1000")
        given = (*self.training_arguments(optimizer), *saving)
        start = ("--load=", "--finetune", "--no-load-optim")
        going_on = tuple(flag for flag in given if not flag.startswith(start))
        return (
            self._plan_job(
                "the plan", optimizer, self.shrunk, (*given, f"--exit-interval={after}")
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
    ) -> Job:
        folder = self._folder / optimizer / name.removeprefix("the ").replace(" ", "-")
        argv = (
            *arguments,
            _plan_flag(shrunk.plan, folder / "plan.json"),
            *shrunk.plan_args,
            *self.options.plan_flags,
            f"--data-cache-path={folder / 'cache'}",
        )

        def train(rank: int) -> None:
            if self.options.fault is not None:
                faults.plant(self.options.fault)
            save_without_a_server()
            recorder = Recorder()
            try:
                entry.main(argv, recorder)
            finally:
                # Megatron ends a run at `--exit-interval` by leaving the process.
                recorder.save(folder / f"record-{rank}")

        return Job(f"{name}, {optimizer}", shrunk.plan.layout.num_devices, train, folder)


def _plan_flag(plan: Plan, path: Path) -> str:
    if plan == plan_from_layout(plan.layout):
        return f"--hetero-layout={format_layout(plan.layout)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_plan(plan, path)
    return f"--hetero-plan={path}"


class FloorRecorder(Recorder):
    """Records a run that differs from the one process in rounding alone.

    It takes each step's micro-batches last to first, which is another order between them; and
    starts from weights that are one unit in the last place off, up or down at random, which moves
    the sums inside of a micro-batch as another order of theirs does (Parker's Monte Carlo
    arithmetic, 1997).
    """

    def __init__(self, shrunk: Shrunk) -> None:
        super().__init__()
        self._count = sum(r.num_micro_batches for r in shrunk.plan.replicas)

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        """Move the weights before the first forward pass: they are loaded after this hook."""
        (chunk,) = model

        def before_the_first(*_: Any) -> None:
            handle.remove()
            round_anew(chunk)

        handle = chunk.register_forward_pre_hook(before_the_first)
        return super().post_wrap_hook(model)

    def recorded(self, provider: Callable[..., Any]) -> EveryRankProvider:
        from megatron.training import get_args

        recorded = super().recorded(provider)

        def provide(num_samples: Any) -> tuple[Any, ...]:
            train, *others = recorded(num_samples)
            return (_ReversedDataset(train, get_args().micro_batch_size, self._count), *others)

        return EveryRankProvider(provide)


def round_anew(module: torch.nn.Module) -> None:
    """Move every weight to the next number of its type, up or down at random (one seed)."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            ends = torch.where(up, torch.inf, -torch.inf).to(parameter)
            parameter.copy_(torch.nextafter(parameter, ends))


class _ReversedDataset:
    def __init__(self, dataset: Any, micro_batch_size: int, count: int) -> None:
        self._dataset, self._size, self._count = dataset, micro_batch_size, count

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        micro_batch, place = divmod(index, self._size)
        step, number = divmod(micro_batch, self._count)
        other = step * self._count + self._count - 1 - number
        return self._dataset[other * self._size + place]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)
