"""`plan --sequences`: groups for sequences of unlike length, flexible or of one degree."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.table import Table

from megatron_hetero.cli.output import Output
from megatron_hetero.cli.unread import MEGATRON_FLAGS
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.files import write_text
from megatron_hetero.model.arguments import command_line_words, group_arguments
from megatron_hetero.model.attention_window import attention_window
from megatron_hetero.model.load import load_workload
from megatron_hetero.report.page.dealt_step import dealt_step_figure
from megatron_hetero.sequences.advice import SequencePlan, plan_sequences
from megatron_hetero.sequences.cluster_groups import cluster_groups
from megatron_hetero.sequences.deal.dealt import Deal
from megatron_hetero.sequences.lengths import read_lengths
from megatron_hetero.sequences.price.modelled import EVERY, TRAINED
from megatron_hetero.units import format_duration

_NUM_STEPS = 4
READS = (
    *("sequences", "picture", "cluster", "without", "profile", "model", "model_env"),
    *(MEGATRON_FLAGS, "json"),
)


def run_sequences(
    arguments: argparse.Namespace, output: Output, cluster: Cluster, profile: Profile | None
) -> int:
    """Plan for a distribution of lengths, print the gain of flexible groups, draw a step.

    Args:
        arguments: of `plan`.
        output: where to print.
        cluster: the machines.
        profile: measurements; None is none.
    Raises:
        InfeasiblePlanError: a sequence is longer than any group can hold.
    """
    lengths = read_lengths(arguments.sequences)
    workload = load_workload(
        arguments.model, arguments.megatron_args, environment=dict(arguments.model_env)
    )
    model = workload.model
    if model.position_embedding == "learned_absolute" and (
        lengths.longest > model.max_position_embeddings
    ):
        output.note(
            f"the longest sequence has {lengths.longest:,} tokens, and the model learns "
            f"{model.max_position_embeddings:,} positions: training refuses it. Give more "
            "--max-position-embeddings, or --position-embedding-type rope"
        )
    window = window_of_all_layers(workload.megatron_args)
    # Once with the exchanges that the runtime trains, once with every kind.
    groups, any_exchange = (
        cluster_groups(cluster, workload, profile, window=window, exchanges=exchanges)
        for exchanges in (TRAINED, EVERY)
    )
    batch = workload.training.global_batch_size
    made = plan_sequences(groups, any_exchange, lengths, batch, _NUM_STEPS)
    if arguments.picture is not None:
        figure = dealt_step_figure(groups.tree, made.batches[0], made.deals[0])
        write_text(arguments.picture, figure.standalone())
    if arguments.json:
        output.json(_data(made))
        return 0
    output.show(*_heading(made), _table(made), _advice(made))
    if not groups.rates[0].is_measured:
        output.show("Simulated from the catalogue, not measured; the exchange of gradients, which "
                    "is the same for all, is not counted.")  # fmt: skip
    if arguments.picture is not None:
        output.show(f"Picture of the first step written to {arguments.picture}")
    return 0


def window_of_all_layers(megatron_args: Sequence[str]) -> int | None:
    """Return the most keys that a query sees in every layer; None if no window is set.

    Raises:
        UsageError: the window is not two numbers.
        UnsupportedError: some layers have a window and others none.
    """
    given = {a.flag for a in group_arguments(command_line_words(megatron_args))}
    if "--window-attn-skip-freq" in given:
        raise UnsupportedError(
            "--window-attn-skip-freq: layers with and without a window are not priced together "
            "yet; leave it out to plan as if all layers had the window"
        )
    return attention_window(megatron_args)


def _heading(made: SequencePlan) -> list[str]:
    lengths, tree = made.lengths, made.groups.tree
    return [
        f"{lengths.num_sequences:,} sequences of {lengths.source}: half have at most "
        f"{lengths.quantile(0.5):,} tokens, {lengths.part_below(8192):.0%} fewer than 8,192, the "
        f"longest {lengths.longest:,} (all GPUs together hold {tree.longest_sequence:,})",
        f"{len(made.deals)} steps of {len(made.batches[0])} sequences on {tree.num_ranks} GPUs, "
        "drawn as often as the file has them",
    ]


def _table(made: SequencePlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("groups")
    for column in ("a step", "relative", "tokens/s"):
        table.add_column(column, justify="right")
    # Tokens of all steps together.
    count, tokens = len(made.deals), sum(map(sum, made.batches))
    rows = [("flexible", made.seconds)]
    # What exchanges would gain that the runtime does not have yet.
    if made.any_exchange_s < made.seconds:
        rows.append(("flexible, rings too (not trained yet)", made.any_exchange_s))
    rows += [(f"all of {degree.size}", degree.seconds) for degree in made.fixed]
    for name, seconds in rows:
        table.add_row(
            name,
            format_duration(seconds / count),
            f"{seconds / made.seconds:.2f}",
            f"{tokens / seconds:,.0f}",
        )
    return table


def _advice(made: SequencePlan) -> str:
    deal = made.deals[0]
    rest = (
        f"Within {made.seconds / made.bound_s - 1:.1%} of what any deal of these micro-batches "
        f"takes; busiest GPU over mean {deal.balance:.2f}. Groups of the first step: "
        f"{'; '.join(' '.join(f'{n}x{s}' for s, n in shape) for shape in _shapes(deal))}."
    )
    if made.gain is None:
        return f"No fixed degree holds the longest sequence in every group. {rest}"
    best = made.fixed[0].size
    if made.is_worth_it:
        return (
            f"Flexible groups (train with --hetero-sequences flexible): the best fixed degree, "
            f"{best}, takes {made.gain:.2f}x. {rest}"
        )
    return f"A fixed degree of {best} is enough: flexible groups gain {made.gain - 1:.1%}. {rest}"


def _shapes(deal: Deal) -> list[list[tuple[int, int]]]:
    """Return (size, number) of the groups of each micro-batch, largest first."""
    return [sorted(Counter(m.sizes).items(), reverse=True) for m in deal.micro_batches]


def _data(made: SequencePlan) -> dict[str, object]:
    lengths = made.lengths
    return {
        "lengths": {
            "num_sequences": lengths.num_sequences,
            "median": lengths.quantile(0.5),
            "longest": lengths.longest,
            "part_below_8192": lengths.part_below(8192),
        },
        "longest_that_fits": made.groups.tree.longest_sequence,
        "advice": "flexible" if made.is_worth_it else made.fixed[0].size,
        "gain": made.gain,
        "flexible_step_s": made.seconds / len(made.deals),
        "any_exchange_step_s": made.any_exchange_s / len(made.deals),
        "over_bound": made.seconds / made.bound_s - 1,
        "fixed": [
            {"degree": degree.size, "step_s": degree.seconds / len(made.deals)}
            for degree in made.fixed
        ],
        "steps": [
            {
                "seconds": deal.seconds,
                "bound_s": deal.bound_s,
                "balance": deal.balance,
                "micro_batches": [
                    {
                        "seconds": m.seconds,
                        "method": m.method,
                        "reason": m.reason,
                        "groups": [
                            {
                                "first_rank": g.first,
                                "num_ranks": g.size,
                                "exchange": made.groups.tree.kinds[g.kind].prices[g.price].name,
                                "seconds": g.seconds,
                                "tokens": [batch[k] for k in g.sequences],
                            }
                            for g in m.groups
                        ],
                    }
                    for m in deal.micro_batches
                ],
            }
            for batch, deal in zip(made.batches, made.deals, strict=True)
        ],
        "is_measured": made.groups.rates[0].is_measured,
    }
