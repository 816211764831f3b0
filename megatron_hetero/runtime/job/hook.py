"""An asymmetric plan in a pre-training script of the user's own.

Such a script takes three functions of Megatron's and calls them in turn; `hooked` gives each a
stand-in that follows the plan of the command line.  The patches of `patches/` put one call of it
into `pretrain_gpt.py`, and `python -m megatron_hetero.launch` does the same from outside.  Without
a flag of `PLAN_FLAGS` the three are Megatron's own functions, untouched.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from megatron_hetero.errors import HeteroError, UsageError
from megatron_hetero.flags.emit import plan_arguments
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.arguments import split_arguments
from megatron_hetero.runtime.job.meeting import MEETING
from megatron_hetero.runtime.job.steps import job_of, job_on_plan
from megatron_hetero.runtime.job.stock import Step
from megatron_hetero.runtime.job.world import World

PLAN_FLAGS = ("--hetero-plan", "--hetero-layout", "--hetero-sequences")


def hooked(
    parse_and_validate_args: Step, gpt_config_from_args: Step, pretrain: Step
) -> tuple[Step, Step, Step]:
    """Return the three functions of a pre-training script, on the plan that `sys.argv` names.

    Errors of the plan or its flags are printed and end the process with their exit code, as in
    `megatron_hetero.pretrain_gpt`: the script around knows nothing of our errors.

    Args:
        parse_and_validate_args: `megatron.training.arguments.parse_and_validate_args`.
        gpt_config_from_args: `megatron.training.argument_utils.gpt_config_from_args`.
        pretrain: `megatron.training.pretrain`.
    Returns:
        The functions to call instead of the three.
    """
    words = sys.argv[1:]
    if not any(word.startswith(PLAN_FLAGS) for word in words):
        return parse_and_validate_args, gpt_config_from_args, pretrain
    job = _or_exit(job_of)(words, of_a_script=True)
    return (
        _stand_in(job.parse, parse_and_validate_args),
        _stand_in(job.configure, gpt_config_from_args),
        _stand_in(job.pretrain, pretrain),
    )


def _stand_in(step: Step, original: Step) -> Step:
    """Bind `original` as the first argument of `step`, and as its `__wrapped__`."""
    return functools.wraps(original)(_or_exit(functools.partial(step, original)))


def on_plan(
    plan: Plan, parse_and_validate_args: Step, gpt_config_from_args: Step, pretrain: Step
) -> tuple[Step, Step, Step]:
    """Return the functions of `hooked` for a plan that the caller gives.

    Args:
        plan: the plan.
        parse_and_validate_args: as in `hooked`.
        gpt_config_from_args: as in `hooked`.
        pretrain: as in `hooked`.
    Raises:
        HeteroError: as an exception, for the caller to handle.
    """
    arguments = split_arguments(sys.argv[1:])
    if arguments.plan is not None or arguments.layout is not None:
        raise UsageError(
            "the plan is given by the program; leave --hetero-plan and --hetero-layout out"
        )
    judged = flag_table().known_part(arguments.megatron)
    plan_arguments(plan, judged, in_our_runtime=arguments.faults.is_replanned)
    job = job_on_plan(plan, arguments, judged)
    return (
        functools.partial(job.parse, parse_and_validate_args),
        functools.partial(job.configure, gpt_config_from_args),
        functools.partial(job.pretrain, pretrain),
    )


def _or_exit(step: Step) -> Step:
    def call(*given: Any, **named: Any) -> Any:
        try:
            with MEETING.refusals_told():
                MEETING.announce(World.from_environment())
                return step(*given, **named)
        except HeteroError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(error.exit_code) from error

    return call
