"""`megatron-hetero plan`: search for a plan, print it and write plan.json."""

from __future__ import annotations

import argparse
import re
import time
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import get_args

from megatron_hetero.cli.arguments import add_model_argument, add_sends_argument, with_sends
from megatron_hetero.cli.goal import add_goal_arguments, objective_of
from megatron_hetero.cli.near import add_near_arguments, check_near_arguments, run_near
from megatron_hetero.cli.output import Output
from megatron_hetero.cli.plan_found import FoundPlan, found_summary, show_found
from megatron_hetero.cli.unread import refuse_unread
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.collector import no_collector
from megatron_hetero.cost.work.profile import load_profile
from megatron_hetero.errors import (
    EXIT_INTERRUPTED,
    CheckFailedError,
    InfeasiblePlanError,
    UsageError,
)
from megatron_hetero.files import check_writable
from megatron_hetero.flags.emit import check_user_flags, megatron_args
from megatron_hetero.flags.notes import (
    memory_savers,
    refused_words,
    unknown_words,
    unread_parts,
)
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner import plan_and_explain
from megatron_hetero.planner.advise.explain import Explanation
from megatron_hetero.planner.portfolio import STRATEGIES, strategies_of
from megatron_hetero.planner.request import PLUGIN_GAIN, USUAL, Schedules
from megatron_hetero.planner.restrictions.measured_sizes import (
    HeldCluster,
    held_to_measured_sizes,
    profile_words,
)
from megatron_hetero.planner.restrictions.mixture import with_mixed_precisions
from megatron_hetero.planner.restrictions.precision import in_best_precision
from megatron_hetero.planner.stock_strategy import STOCK

DESCRIPTION = """\
Divide a model over a cluster of unlike GPUs: how many replicas, which GPUs form
each stage, how many layers and which tensor-parallel width each stage has, how
many micro-batches each replica does.  Needs no GPU and no torch.

  megatron-hetero plan --cluster cluster.yaml --model gpt.sh -o plan.json
  megatron-hetero plan --cluster cluster.yaml --model config.json \\
      -- --seq-length 4096 --global-batch-size 64 --micro-batch-size 1 --bf16"""
TAKES_MEGATRON_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `plan`."""
    parser.add_argument("--cluster", type=Path, metavar="CLUSTER.YAML", help="the machines")
    add_model_argument(
        parser,
        "a Megatron script, a file of Megatron flags, or a Hugging Face config.json; "
        "flags after `--` are added to it and win",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="PROFILE.JSON", help="measurements to plan from"
    )
    parser.add_argument(
        "--scale-profile",
        action="store_true",
        help="compare micro-batch sizes too of which a profile with a single size says nothing: "
        "the cost model says how they differ from it",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="MACHINE[:GPU]",
        help="plan as if this machine or GPU of the cluster file were not there; repeatable",
    )
    parser.add_argument(
        "--strategy",
        type=_strategy,
        default="auto",
        metavar="NAME",
        help=f"how to search: {', '.join(sorted([*STRATEGIES, STOCK]))} (default: auto, the best "
        f"plans; thorough: the same, going on for up to ten times as long; {STOCK}: the best "
        "plan that needs no plug-in; the others are for comparison)",
    )
    parser.add_argument(
        "--schedule",
        choices=get_args(Schedules),
        default="counts",
        help="1F1B with launch counts (default), or the best order of computations: also "
        "interleaved, split and computed orders for the best plans; takes longer",
    )
    parser.add_argument(
        "--stage-precision",
        choices=("job", "mixed"),
        default="job",
        help="job: all stages in the job's precision (default); mixed: stages whose GPUs lack it "
        "(bf16 on V100, T4, RTX 20) in fp16, or fp32 where there is neither, which rounds "
        "otherwise (docs/precision.md)",
    )
    add_sends_argument(parser, "as-run")
    parser.add_argument(
        "--prove",
        action="store_true",
        help="spend up to a minute more on the lower bound: tighter, and in clusters of more "
        "than 128 GPUs not by their work alone",
    )
    parser.add_argument(
        "--simplest",
        metavar="PERCENT",
        help="not the best plan but the one nearest to stock Megatron that is at most so far "
        'behind, for example "5%%": first what stock Megatron runs, then what has fewer reasons '
        "for the plug-in, then fewer unlike parts",
    )
    parser.add_argument(
        "--plugin-gain",
        metavar="PERCENT",
        help="a plan that needs the plug-in and gains no more over the best of stock Megatron "
        f'gives way to it (default: "{PLUGIN_GAIN:.0%}%"; "0%%": only to a faster one)',
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="only say which GPUs would hold the model at all, and how many of each type: of the "
        "catalogue, or with --cluster of the types there",
    )
    parser.add_argument(
        "--sequences",
        type=Path,
        metavar="LENGTHS.TXT",
        help="only plan for sequences of these lengths (a length in tokens, and how many, on each "
        "line): one context-parallel degree, or groups of unlike size from step to step, and what "
        "these gain",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="STEP.SVG", help="draw one step; needs --sequences"
    )
    add_goal_arguments(parser)
    add_near_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN.JSON", help="write the plan")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


@no_collector()
def run(arguments: argparse.Namespace, output: Output) -> int:
    """Plan, print, save."""
    # Other questions than a plan of training: lengths of sequences, memory, a plan near an old one.
    if arguments.picture is not None and arguments.sequences is None:
        raise UsageError("--picture draws a step of sequences, so it needs --sequences LENGTHS.TXT")
    # Memory alone needs no cluster.
    if arguments.memory and arguments.sequences is None:
        from megatron_hetero.cli import memory  # other questions load what is theirs

        # Nothing is searched, so options of the search have nothing to change.
        refuse_unread(arguments, add_arguments, memory.READS, "--memory makes no plan")
        return memory.run_memory(arguments, output)
    if arguments.cluster is None:
        raise UsageError(
            "--cluster CLUSTER.YAML is missing: the machines to plan for (`init` writes a "
            "starter); without one, --memory says which GPUs would hold the model"
        )
    if arguments.sequences is not None:
        from megatron_hetero.cli import sequences  # a third of a second

        # Groups are chosen from step to step, so there is no plan to write.
        refuse_unread(arguments, add_arguments, sequences.READS, "--sequences makes no plan.json")
    # Machines and GPUs of --without are gone from here on.
    cluster = load_cluster(arguments.cluster).without(arguments.without)
    profile = load_profile(arguments.profile) if arguments.profile else None
    if arguments.sequences is not None:
        return sequences.run_sequences(arguments, output, cluster, profile)
    check_near_arguments(arguments)
    if arguments.stage_precision == "mixed":
        if arguments.strategy == STOCK:
            raise UsageError("--stage-precision mixed: stock Megatron has one precision")
        if arguments.shard_layers:
            raise UsageError("--stage-precision mixed does not go with --shard-layers yet")
    # A search may take minutes, and its plan should have a place.
    if arguments.output is not None:
        check_writable(arguments.output)
    if arguments.near is not None:
        return run_near(arguments, output, cluster, profile)
    # The job, the goal, and the cluster whose measured sizes the plan may use.
    workload = with_sends(
        load_workload(
            arguments.model, arguments.megatron_args, environment=dict(arguments.model_env)
        ),
        arguments.sends,
    )
    check_user_flags(workload.megatron_args)
    if arguments.stage_precision == "mixed":
        workload = with_mixed_precisions(workload)
    objective = objective_of(arguments, workload)
    start_s = time.perf_counter()
    with output.search_progress() as progress:
        search = partial(
            plan_and_explain,
            profile=profile,
            progress=progress,
            strategy=arguments.strategy,
            objective=objective,
            schedules=arguments.schedule,
            prove=arguments.prove,
            simplest_within=_part(arguments.simplest),
            plugin_gain=_plugin_gain(arguments, objective.may_want_fewer(cluster)),
        )

        def held_search(job: Workload) -> tuple[Plan, Explanation, HeldCluster]:
            # A profile of one micro-batch size says nothing of other sizes: they are left out.
            known = None if arguments.scale_profile else profile
            held = held_to_measured_sizes(cluster, job, known)
            return *search(held.cluster, job), held

        try:
            chosen = in_best_precision(held_search, itemgetter(0), cluster, workload, objective)
        except InfeasiblePlanError as error:
            # The message also names flags of the job that would save memory.
            raise InfeasiblePlanError(f"{error} {memory_savers(workload)}".strip()) from None
    (plan, explanation, held), search_s = chosen.found, time.perf_counter() - start_s
    # The profile is judged in the precision of the plan, which the job need not name.
    cluster, of_profile = held.cluster, profile_words(cluster, plan.workload or workload, profile)
    said = tuple(words for words in (held.words, *of_profile, *map(str, cluster.doubts)) if words)
    # A plan whose flags contradict it is refused here, not by `flags` on another day.
    megatron_args(plan, str(arguments.output or "plan.json"))
    if arguments.output is not None:
        save_plan(plan, arguments.output)
    # A job that would not start gives exit code 1, with the plan saved.
    refused = refused_words(plan, explanation.best_stock is not None)
    code = CheckFailedError.exit_code if refused or unknown_words(unread_parts(plan)) else 0
    code = EXIT_INTERRUPTED if explanation.interrupted else code
    if explanation.interrupted:
        output.note("interrupted: this is the best plan found so far")
    found = FoundPlan(plan, explanation, workload, cluster, profile, search_s, chosen.words, said)
    if arguments.json:
        output.json(found_summary(arguments, found))
    else:
        show_found(arguments, output, found)
    return code


def _strategy(name: str) -> str:
    """Return a name of a strategy.

    Raises:
        ArgumentTypeError: there is none of this name, or no more.
    """
    # Names of earlier releases get an answer of their own.
    if name not in (*STRATEGIES, STOCK):
        try:
            strategies_of(name)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _plugin_gain(arguments: argparse.Namespace, has_goal: bool) -> float | None:
    """Read `--plugin-gain`, which the usual search alone asks for.

    Args:
        has_goal: more than the step time counts.
    Raises:
        UsageError: it was given beside another search.
    """
    if arguments.plugin_gain is None:
        return PLUGIN_GAIN
    others = {
        f"--strategy {arguments.strategy}": arguments.strategy not in USUAL,
        "--schedule best": arguments.schedule == "best",
        "--simplest": arguments.simplest is not None,
        "--stock": arguments.stock,
        "an objective or limits of money": has_goal,
    }
    if given := [name for name, is_given in others.items() if is_given]:
        raise UsageError(
            f"--plugin-gain does not go with {' and '.join(given)}: it compares the fastest plan "
            "of the usual search with stock Megatron's"
        )
    return _part(arguments.plugin_gain, "--plugin-gain")


def _part(percent: str | None, flag: str = "--simplest") -> float | None:
    """Read `5%` as 0.05."""
    if percent is None:
        return None
    number = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", percent.strip())
    if number is None:
        raise UsageError(f'{flag} "{percent}": write a percentage, for example 5%')
    return float(number[1]) / 100
