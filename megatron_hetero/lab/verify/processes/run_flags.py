"""Flags of the runs of a verification, and the precisions in which the runs train."""

from __future__ import annotations

from math import frexp
from pathlib import Path

from megatron_hetero.lab.verify.distance.adam import AdamSettings
from megatron_hetero.lab.verify.options import (
    HALF_PRECISION_EPSILON,
    LEARNING_RATE,
    Options,
    loss_scale_flags,
    precision_flags,
)
from megatron_hetero.lab.verify.processes.optimizer_flags import ADAM, OTHER_RATES
from megatron_hetero.lab.verify.small.job_flags import NO_FLAGS, JobFlags, without_flags
from megatron_hetero.lab.verify.small.shrink import Shrunk
from megatron_hetero.lab.verify.small.text import tokenizer_arguments
from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.model.training import Precision
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.precision import in_one_precision, stage_precisions


class RunFlags:
    """Flags and precisions of the runs of a verification, with common data and seed checkpoint."""

    def __init__(
        self, shrunk: Shrunk, options: Options, folder: Path, flags: JobFlags = NO_FLAGS
    ) -> None:
        self.shrunk = shrunk
        self.options = options
        self._flags = flags
        self._folder = folder
        self._text = folder / "text"
        self._seed = folder / "seed"
        # Megatron shuffles samples over whole epochs; a margin keeps all steps in the first one.
        num_samples = 2 * (options.steps + 1) * shrunk.global_batch_size
        self._num_tokens = num_samples * (shrunk.model.seq_length + 1)
        self._common = (
            *tokenizer_arguments(self._text),
            "--lr-decay-style=constant",
            "--log-interval=1",
            "--eval-iters=0",
            "--eval-interval=1000000",
            "--num-workers=0",
            # A NaN is a difference like others, which the comparison names.
            "--no-check-for-nan-in-loss-and-grad",
            "--distributed-timeout-minutes=5",
            "--ckpt-format=torch_dist",
        )
        self._is_per_token = "--calculate-per-token-loss" in shrunk.model_args
        self._one_process = (f"--make-vocab-size-divisible-by={shrunk.vocab_multiple}",)

    def plan_of(self, optimizer: str) -> Plan:
        """Return the plan that trains with `optimizer`: as it is, or all in fp32."""
        if optimizer in self.options.fp32_optimizers:
            return in_one_precision(self.shrunk.plan)
        return self.shrunk.plan

    def precisions_of(self, optimizer: str) -> set[Precision]:
        """Return the precisions of the plan's stages in the runs with `optimizer`."""
        table = stage_precisions(self.plan_of(optimizer), self.options.precision_of(optimizer))
        return {precision for replica in table for precision in replica}

    @property
    def has_fp8(self) -> bool:
        """Tell if the products of runs in half precision are in fp8."""
        return "--fp8-format" in self._flags.half

    def mixes_precisions(self, optimizer: str) -> bool:
        return len(self.precisions_of(optimizer)) > 1

    def rounds_alike(self, optimizer: str) -> bool:
        """Tell if the one process rounds as the plan does: it casts where the plan does, and scales
        losses alike (but for powers of two), and no stage is divided: in half precision it rounds
        the parts of its sums, in fp32 it adds them in another order, and a cast behind a sum may
        fall to the other side."""
        if not self.mixes_precisions(optimizer):
            return False
        plan = self.plan_of(optimizer)
        counts = [replica.num_micro_batches for replica in plan.replicas]
        scales = {sum(counts) / count for count in counts}
        if not self._is_per_token and any(frexp(scale)[0] != 0.5 for scale in scales):
            return False
        stages = [stage for replica in plan.replicas for stage in replica.stages]
        return all(stage.shape.num_devices == 1 for stage in stages)

    def replays_routing(self, optimizer: str) -> bool:
        """Tell if the plan follows the one process's experts; that process then runs first."""
        is_half = self.options.precision_of(optimizer) != "fp32"
        is_half = is_half and not self.mixes_precisions(optimizer)
        return is_half and self.shrunk.model.num_experts > 0

    def _model_arguments(self, precision: Precision, has_fp16: bool) -> tuple[str, ...]:
        half = self._flags.half if precision == self._flags.precision else ()
        # The job's own last, so that its weight decay or clipping counts.
        return (
            *self._common,
            *precision_flags(precision),
            *(loss_scale_flags(self._is_per_token) if has_fp16 else ()),
            *self.shrunk.model_args,
            *self._flags.both,
            *half,
        )

    def training_arguments(self, optimizer: str, in_fp32: bool = False) -> tuple[str, ...]:
        asked = self.options.precision_of(optimizer)
        trained = self.precisions_of(optimizer)
        epsilon = () if trained == {"fp32"} else (f"--adam-eps={HALF_PRECISION_EPSILON}",)
        # The job's rate for the job's optimizer, a usual rate for the other one.
        rates = self._flags.learning_rates
        rate = rates.get(optimizer, LEARNING_RATE[optimizer])
        model = (
            self._model_arguments("fp32", False)
            if in_fp32
            else self._model_arguments(asked, "fp16" in trained)
        )
        if rates and optimizer not in rates:
            # The job's other rates are of its own optimizer.
            model = without_flags(model, OTHER_RATES)
        return (
            *model,
            *epsilon,
            f"--train-iters={self.options.steps}",
            f"--optimizer={optimizer}",
            f"--lr={rate}",
            f"--load={self._seed}",
            "--finetune",
            "--no-load-optim",
            "--no-load-rng",
            "--exit-on-missing-checkpoint",
        )

    def adam_settings(self) -> AdamSettings:
        """Return the settings of Adam in runs in fp32."""
        options = last_of_each(flag_table().split(self._flags.both))
        given = {option.name: float(option.values[0]) for option in options if option.name in ADAM}
        return AdamSettings(**{ADAM[name]: value for name, value in given.items()})
