"""Arguments for the objective of a plan and for the length of the run."""

from __future__ import annotations

import argparse
import math

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import UsageError
from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.objective import OBJECTIVES, Objective
from megatron_hetero.units import UnitError, parse_count, parse_time_span


def add_goal_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--objective`, the length of the run and its limits."""
    goal = parser.add_argument_group(
        "what the plan is to be the best by",
        "Prices stand in cluster.yaml (price_per_hour, price_per_gb).",
    )
    goal.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="throughput",
        help="the fastest step (default), the least money for a token, or the fewest GPUs that "
        "keep --deadline",
    )
    goal.add_argument(
        "--steps", metavar="N", help="steps of the whole run (default: --train-iters of the job)"
    )
    goal.add_argument(
        "--tokens", metavar="N", help="tokens of the whole run instead, for example 20B"
    )
    goal.add_argument(
        "--deadline", metavar="TIME", help='the run may take so long, for example "36 h" or "12 d"'
    )
    goal.add_argument(
        "--budget", metavar="MONEY", help="the run may cost so much, in the cluster's currency"
    )
    goal.add_argument(
        "--stock",
        action="store_true",
        help="only plans that stock Megatron runs, without the plug-in",
    )
    goal.add_argument(
        "--shard-layers",
        action="store_true",
        help="also plans whose replicas divide the weights of some layers, where they gain 2 %% or "
        "nothing else fits; needs --use-distributed-optimizer among the job's flags",
    )


def asks_for_a_goal(arguments: argparse.Namespace, cluster: Cluster) -> bool:
    """Return whether more was asked for than the fastest step."""
    given = (arguments.steps, arguments.tokens, arguments.deadline, arguments.budget)
    # A price limit in the cluster file is a goal as well.
    limited = cluster.limits.max_price_per_hour is not None
    return limited or arguments.objective != "throughput" or any(given)


def objective_of(arguments: argparse.Namespace, workload: Workload) -> Objective:
    """Read the objective of a command line.

    Raises:
        UsageError: a value is malformed, or two of them do not go together.
    """
    if arguments.shard_layers and not workload.training.use_distributed_optimizer:
        raise UsageError(
            "--shard-layers divides the optimizer's state as well: add --use-distributed-optimizer "
            "to the model's flags"
        )
    if arguments.shard_layers and arguments.stock:
        raise UsageError("--shard-layers needs the plug-in, --stock is without it: give one")
    return Objective(
        name=arguments.objective,
        num_steps=num_steps_of(arguments, workload),
        deadline_s=_parsed("--deadline", arguments.deadline),
        budget=_parsed("--budget", arguments.budget),
        stock_only=arguments.stock,
        shards_layers=arguments.shard_layers,
    )


def num_steps_of(arguments: argparse.Namespace, workload: Workload) -> float | None:
    """Read the steps of the run: as given, else as the job's own flags say; None if nothing
    does."""
    steps, tokens = _parsed("--steps", arguments.steps), _parsed("--tokens", arguments.tokens)
    if steps is not None and tokens is not None:
        raise UsageError("--steps and --tokens both say how long the run is; give one of them")
    # In sequences; the number of steps need not be whole.
    batch = workload.training.global_batch_size
    if tokens is not None:
        return tokens / (batch * workload.model.seq_length)
    if steps is not None:
        return steps
    # The job's own flags, of which iterations win over samples.
    iterations = _own_number(workload, "--train-iters")
    samples = _own_number(workload, "--train-samples")
    return samples / batch if iterations is None and samples is not None else iterations


def _own_number(workload: Workload, flag: str) -> float | None:
    """Read the value of one of the job's own flags; of several the last, as argparse does."""
    for option in last_of_each(flag_table().split(workload.megatron_args)):
        if flag in option.flag.names:
            return _parsed(flag, option.values[0])
    return None


def _parsed(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = parse_time_span(text) if flag == "--deadline" else parse_count(text)
    except UnitError as error:
        raise UsageError(f"{flag}: {error}") from None
    # "nan" and "inf" are numbers to the parser.
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{flag} {text}: it must be above 0")
    return value
