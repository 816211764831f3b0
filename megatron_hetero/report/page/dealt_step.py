"""A step of dealt sequences: groups of ranks against time, each sequence a block."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.report.page.figure import (
    PAGE_WIDTH,
    Figure,
    fitted,
    legend,
    line,
    number,
    rect,
    text,
    ticks,
)
from megatron_hetero.sequences.deal.dealt import Deal, DealtGroup
from megatron_hetero.sequences.deal.price_table import PriceTable, price_table
from megatron_hetero.sequences.tree import GroupTree
from megatron_hetero.units import format_duration

_LEFT, _TOP, _BOTTOM = 70.0, 34.0, 40.0
_LEAST_BLOCK = 0.4
"""Width, in user units, below which neighbouring blocks are joined into a larger block."""
# (limit in tokens, class of the colour), rising.
_CLASSES = ((2048, "p0"), (8192, "p6"), (32768, "p1"), (131072, "p2"))
_LONGEST = "p4"


def dealt_step_figure(tree: GroupTree, lengths: Sequence[int], deal: Deal) -> Figure:
    """Draw what each rank trains when; what is left white of a micro-batch is waiting.

    Args:
        tree: the groups of the job.
        lengths: of the sequences of the step, in tokens.
        deal: of these sequences.
    """
    # Rows shrink with the number of ranks, down to 5 units.
    row = min(26.0, max(5.0, 520.0 / deal.num_ranks))
    width, height = PAGE_WIDTH - _LEFT - 20.0, row * deal.num_ranks
    scale = width / deal.seconds
    table = price_table(tree, lengths)
    parts = [_legend(), rect(_LEFT, _TOP, width, height, "lane")]
    # Names of ranks about every 18 units.
    for rank in range(deal.num_ranks):
        if rank % max(1, round(18 / row)) == 0:
            parts.append(
                text(_LEFT - 8, _TOP + row * (rank + 0.5) + 4, f"rank {rank}", "tiny", anchor="end")
            )
    # Micro-batches follow each other; in each the groups stand on their ranks.
    start_s = 0.0
    for micro_batch in deal.micro_batches:
        for group in micro_batch.groups:
            x, y = _LEFT + start_s * scale, _TOP + group.first * row
            parts += _group(table, lengths, group, x, y, scale, group.size * row)
        start_s += micro_batch.seconds
        at = _LEFT + start_s * scale
        parts.append(line(at, _TOP - 4, at, _TOP + height + 4, "limit"))
    # The axis of time below.
    for value in ticks(deal.seconds):
        at = _LEFT + value * scale
        parts.append(text(at, _TOP + height + 20, format_duration(value), "tiny", anchor="middle"))
    words = (
        f"{len(lengths)} sequences in {len(deal.micro_batches)} micro-batches on "
        f"{deal.num_ranks} ranks; busiest over mean {deal.balance:.2f}"
    )
    return Figure(
        "sequences",
        f"Sequences dealt to groups of ranks in one simulated step: {words}",
        _TOP + height + _BOTTOM,
        "".join(parts),
    )


def _group(
    table: PriceTable,
    lengths: Sequence[int],
    group: DealtGroup,
    x: float,
    y: float,
    scale: float,
    height: float,
) -> list[str]:
    """Draw a group: what it takes once, then its sequences, the longest first.

    Args:
        table: prices of the step.
        lengths: of its sequences.
        group: the group.
        x, y: its corner.
        scale: user units of a second.
        height: of its ranks.
    """
    # The price table has options by kind of group: the one that the deal has chosen.
    option = [w for w, kind in enumerate(table.kind_of_option) if kind == group.kind][group.price]
    once = float(table.fixed_s[option]) * scale
    parts = [rect(x, y, once, height, "wait", title=f"once {number(once / scale * 1e3)} ms")]
    x += once
    # Short sequences are joined until their block can be seen.
    waiting: list[int] = []
    drawn = 0.0
    order = sorted(group.sequences, key=lambda k: (-lengths[k], k))
    for k in order:
        waiting.append(k)
        drawn += float(table.seconds[option, k]) * scale
        if drawn < _LEAST_BLOCK and k != order[-1]:
            continue
        # A little white between blocks.
        gap = min(0.6, drawn / 4)
        longest = lengths[waiting[0]]
        if len(waiting) == 1:
            title = f"{longest:,} tokens on ranks {group.first} to {group.stop - 1}"
        else:
            title = f"{len(waiting)} sequences of {longest:,} tokens and less"
        parts.append(rect(x, y + 0.4, drawn - gap, height - 0.8, _class_of(longest), title=title))
        # The number of tokens, only if it fits uncut.
        words = fitted(f"{longest:,}", drawn - 4, 10)
        if len(waiting) == 1 and height >= 12 and words == f"{longest:,}":
            parts.append(text(x + 3, y + height / 2 + 4, words, "on"))
        x, drawn = x + drawn, 0.0
        waiting = []
    return parts


def _class_of(tokens: int) -> str:
    return next((kind for limit, kind in _CLASSES if tokens < limit), _LONGEST)


def _legend() -> str:
    entries = [(kind, f"below {limit // 1024}K tokens") for limit, kind in _CLASSES]
    return legend((*entries, (_LONGEST, "longer"), ("wait", "launch, or waiting")), 0, 14)
