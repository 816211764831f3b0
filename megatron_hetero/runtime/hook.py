"""An asymmetric plan in a pre-training script of the user's own.

Such a script takes three functions of Megatron's and calls them in turn; `hooked` gives each a
stand-in that follows the plan of the command line.  The patches of `patches/` put one call of it
into `pretrain_gpt.py`, and `python -m megatron_hetero.launch` does the same from outside.  Without
`--hetero-plan` or `--hetero-layout` the three are Megatron's own functions, untouched.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

from megatron_hetero.errors import HeteroError
from megatron_hetero.runtime.arguments import add_hetero_arguments
from megatron_hetero.runtime.job import Step, job_of

PLAN_FLAGS = ("--hetero-plan", "--hetero-layout")


def hooked(
    parse_and_validate_args: Step, gpt_config_from_args: Step, pretrain: Step
) -> tuple[Step, Step, Step]:
    """The three functions of a pre-training script, on the plan that `sys.argv` names.

    What the plan or its flags get wrong is printed and ends the process with the error's exit code,
    as from `megatron_hetero.pretrain_gpt`: the script around knows nothing of our errors.

    Returns:
        What to call instead of `megatron.training.arguments.parse_and_validate_args`,
        `megatron.training.argument_utils.gpt_config_from_args` and `megatron.training.pretrain`.
    """
    words = sys.argv[1:]
    if "--help" in words or "-h" in words:
        return _with_our_flags(parse_and_validate_args), gpt_config_from_args, pretrain
    if not any(word.startswith(PLAN_FLAGS) for word in words):
        return parse_and_validate_args, gpt_config_from_args, pretrain
    job = _or_exit(job_of)(words)
    return (
        _or_exit(functools.partial(job.parse, parse_and_validate_args)),
        _or_exit(functools.partial(job.configure, gpt_config_from_args)),
        _or_exit(functools.partial(job.pretrain, pretrain)),
    )


def _or_exit(step: Step) -> Step:
    def call(*given: Any, **named: Any) -> Any:
        try:
            return step(*given, **named)
        except HeteroError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(error.exit_code) from error

    return call


def _with_our_flags(parse_and_validate_args: Step) -> Step:
    """Megatron's parser, whose `--help` lists our flags too."""

    def parse(
        extra_args_provider: Callable[[Any], Any] | None = None, *given: Any, **named: Any
    ) -> Any:
        def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            given_parser = extra_args_provider(parser) if extra_args_provider else parser
            return add_hetero_arguments(given_parser)

        return parse_and_validate_args(provide, *given, **named)

    return parse
