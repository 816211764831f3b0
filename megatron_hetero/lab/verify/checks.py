"""Checks before a verification starts: memory, and a checkpoint between the steps."""

from __future__ import annotations

from megatron_hetero.errors import EnvironmentMismatchError, UnsupportedError, UsageError
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.small.architecture import BALANCING, balances_by_choice
from megatron_hetero.lab.verify.small.shrink import Shrunk
from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.model.spec import Workload
from megatron_hetero.runtime.job.local.capacity import (
    RANK_BYTES,
    available_bytes,
    most_processes,
)
from megatron_hetero.schedule.stock import is_stock

PACKED = {"--sft", "--dataloader-inter-document-masking"}
"""Flags that put several documents into a sequence, each by itself."""


def check_alike(workload: Workload, options: Options) -> None:
    """Refuse what the one process does otherwise, which would look like an error of the plan's.

    Raises:
        UnsupportedError: experts are balanced by sinkhorn, or drop tokens, in half precision; or
            further tokens of packed documents are predicted.
    """
    given = {o.name for o in last_of_each(flag_table().split(workload.megatron_args))}
    if workload.model.mtp_num_layers and given & PACKED:
        raise UnsupportedError(
            "--mtp-num-layers with packed documents: on a CPU the one process masks documents in "
            "the place of packing them, and its further tokens cross their edges. Leave out "
            f"{' and '.join(sorted(given & PACKED))} to compare the rest."
        )
    # In half precision the plan follows the one process's choices, where Megatron lets it.
    half = any(options.precision_of(o) != "fp32" for o in options.optimizers)
    if half and workload.model.num_experts and balances_by_choice(workload):
        raise UnsupportedError(
            f"{BALANCING} sinkhorn: in half precision a plan has to be given the one process's "
            "choices of experts, and Megatron's sinkhorn takes none. Add --precision fp32."
        )
    if half and "--moe-expert-capacity-factor" in given:
        raise UnsupportedError(
            "--moe-expert-capacity-factor: in half precision the order in which tokens are dropped "
            "hangs on rounding, and a plan cannot be given the one process's drops. Add "
            "--precision fp32."
        )


def check_resumed(shrunk: Shrunk, workload: Workload, options: Options) -> None:
    """Refuse a checkpoint between the steps where nothing could be compared behind it.

    Raises:
        UnsupportedError: stock Megatron cannot resume the job on a CPU, or choices of experts would
            have to be replayed from the middle.
    """
    # The run is not interrupted.
    if not options.resumes_after:
        return
    if not 0 < options.resumes_after < options.steps:
        raise UsageError("--resume needs a step before and behind it; give --steps 2 or more")
    if "adam" not in options.optimizers:
        raise UnsupportedError(
            "--resume: Megatron cannot load the state of SGD. Leave out --optimizer sgd."
        )
    if is_stock(shrunk.plan) and workload.training.use_distributed_optimizer:
        raise UnsupportedError(
            "--resume: stock Megatron, which runs this plan, does not resume "
            "--use-distributed-optimizer with the Adam that a CPU has. Leave out the one or the "
            "other."
        )
    # Only Adam's run is interrupted.
    half = options.precision_of("adam") != "fp32"
    if half and workload.model.num_experts:
        raise UnsupportedError(
            "--resume: in half precision the plan replays the one process's choices of experts, "
            "from the first step on. Add --precision fp32."
        )


def check_capacity(num_processes: int) -> None:
    """Refuse a run that this machine's memory cannot hold.

    Raises:
        EnvironmentMismatchError: there are too many processes; the message says how many fit.
    """
    most, free = most_processes(), available_bytes() / 2**30
    if num_processes > most:
        raise EnvironmentMismatchError(
            f"verifying this plan takes {num_processes} processes of about "
            f"{RANK_BYTES >> 20} MiB each; {free:.1f} GiB are free here, enough for {most}. "
            "Verify on a larger machine, or a plan for fewer devices."
        )
