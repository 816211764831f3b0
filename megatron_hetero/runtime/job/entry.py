"""The training entry: Megatron's own `pretrain`, from Megatron's flags, on an asymmetric plan.

    torchrun ... -m megatron_hetero.pretrain_gpt <Megatron flags> --hetero-plan plan.json

All refusals come before the first process group exists. A plan that stock Megatron can express is
handed to stock Megatron, in stock flags; so is a command line without a plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.arguments import HeteroArguments
from megatron_hetero.runtime.job.asymmetric import AsymmetricJob
from megatron_hetero.runtime.job.meeting import MEETING
from megatron_hetero.runtime.job.steps import TrainingJob, job_of
from megatron_hetero.runtime.job.stock import StockJob
from megatron_hetero.runtime.job.world import World

# What `pretrain_gpt.py` of Megatron-LM passes to the parser.
ARGUMENT_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


class Observer(Protocol):
    """Observer of a run, without influence on the run (see `lab.verify.processes.recorder`)."""

    def observe_log(self) -> None: ...

    def post_wrap_hook(self, model: list[Any]) -> list[Any]: ...

    def recorded(self, provider: Callable[..., Any]) -> Callable[..., Any]: ...


def main(argv: Sequence[str] | None = None, observer: Observer | None = None) -> None:
    """Train; `argv` defaults to the command line.

    Raises:
        HeteroError: flags, plan, model or machine contradict each other, or something is
            unsupported.
    """
    with MEETING.refusals_told():
        MEETING.announce(World.from_environment())
        train(job_of(sys.argv[1:] if argv is None else argv), observer)


def train_stock(
    megatron: Sequence[str],
    world: World,
    observer: Observer | None = None,
    init: str = "megatron",
) -> None:
    """Train as stock Megatron does."""
    train(StockJob(megatron, world, init), observer)


def train_asymmetric(
    plan: Plan, arguments: HeteroArguments, world: World, observer: Observer | None = None
) -> None:
    """Train on the plan in our runtime, even if stock Megatron could run it."""
    train(AsymmetricJob(plan, arguments, world), observer)


def train(job: TrainingJob, observer: Observer | None = None) -> None:
    """Make the three calls of Megatron's `pretrain_gpt.py`, through `job`."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_hetero.runtime.model import gpt

    args = job.parse(parse_and_validate_args, args_defaults=ARGUMENT_DEFAULTS)
    model = job.configure(gpt_config_from_args, args)
    config = pretrain_cfg_container_from_args(args, model)
    provider: Callable[..., Any] = gpt.datasets_provider
    if observer is not None:
        observer.observe_log()
        model.post_wrap_hooks.append(observer.post_wrap_hook)
        provider = observer.recorded(provider)
    job.pretrain(pretrain, config, provider, ModelType.encoder_or_decoder, gpt.forward_step)
