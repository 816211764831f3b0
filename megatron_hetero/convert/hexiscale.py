"""HexiScale (FlashFlex): `--hetero_configs --layer_partitions --chunks --global_bsz_size`.

One entry of each for every pipeline: its stages' tensor-parallel widths, its stages' layers, its
micro-batches, its sequences in a step (README of Relaxed-System-Lab/FlashFlex).
"""

from __future__ import annotations

from megatron_hetero.convert.given import Conversion, GivenFlags
from megatron_hetero.convert.list_literal import parse_pipelines
from megatron_hetero.convert.ours_alone import refuse_our_own
from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Layout, ReplicaShape, StageShape

_LEFT_OUT = ("--hetero", "--pp_", "--default_dp_type", "--checkpoint-", "--recompute", "--accum")


def from_hexiscale(flags: GivenFlags) -> Conversion:
    """Read the layout that HexiScale's flags describe.

    Raises:
        UsageError: the lists do not agree, or a batch is no whole number of micro-batches.
        UnsupportedError: ranks in an order of their own.
    """
    # One list of stages for each pipeline; both lists have the same form.
    widths = parse_pipelines(flags.text("--hetero_configs"), "--hetero_configs")
    layers = parse_pipelines(flags.text("--layer_partitions"), "--layer_partitions")
    if [len(p) for p in widths] != [len(p) for p in layers]:
        raise UsageError(
            f"--hetero_configs has pipelines of {[len(p) for p in widths]} stages, "
            f"--layer_partitions of {[len(p) for p in layers]}; they have to be the same"
        )
    # All pipelines hold the same model.
    totals = sorted({sum(p) for p in layers})
    if len(totals) != 1:
        raise UsageError(f"--layer_partitions: pipelines of {totals} layers; all hold one model")
    _check_ranks(flags, widths)
    count = len(widths)
    # `--chunks` are micro-batches, so a batch over chunks is the micro-batch size.
    chunks = _for_each(flags, "--chunks", count)
    batches = _for_each(flags, "--global_bsz_size", count)
    replicas = []
    for i in range(count):
        if batches[i] % chunks[i]:
            raise UsageError(
                f"pipeline {i}: --global_bsz_size {batches[i]} is no multiple of --chunks "
                f"{chunks[i]}, so its micro-batches would be unlike; change one of them"
            )
        stages = tuple(StageShape(w, n) for w, n in zip(widths[i], layers[i], strict=True))
        replicas.append(ReplicaShape(stages, chunks[i], batches[i] // chunks[i]))
    notes = tuple(f"{name} is not converted" for name in flags.never_asked_for(_LEFT_OUT))
    return Conversion(format_layout(Layout(tuple(replicas))), notes)


def to_hexiscale(layout: Layout, micro_batch_size: int | None) -> str:
    """Write HexiScale's flags for a layout.

    Args:
        micro_batch_size: the job's, for replicas that name none.
    Raises:
        UnsupportedError: a part that `refuse_our_own` refuses.
        UsageError: no micro-batch size is known.
    """
    # Refuse what HexiScale cannot express.
    refuse_our_own(layout, "HexiScale")
    sizes = []
    for replica in layout.replicas:
        size = replica.micro_batch_size or micro_batch_size
        if size is None:
            raise UsageError(
                "the plan does not know the micro-batch size; write it into the layout (@12x1)"
            )
        sizes.append(size)
    # Its lists, in the order of the replicas.
    widths = [[s.tensor_parallel for s in r.stages] for r in layout.replicas]
    layers = [[s.num_layers for s in r.stages] for r in layout.replicas]
    counts = [r.num_micro_batches for r in layout.replicas]
    batches = [count * size for count, size in zip(counts, sizes, strict=True)]
    return " ".join(
        (
            f"--hetero_configs '{widths}'",
            f"--layer_partitions '{layers}'",
            f"--chunks {' '.join(map(str, counts))}",
            f"--global_bsz_size {' '.join(map(str, batches))}",
        )
    )


def _for_each(flags: GivenFlags, flag: str, count: int) -> tuple[int, ...]:
    """Return a number for each pipeline; one number stands for all."""
    values = flags.integers(flag)
    # A single number holds for all pipelines.
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise UsageError(f"{flag}: {len(values)} numbers for {count} pipelines")
    return values


def _check_ranks(flags: GivenFlags, widths: list[list[int]]) -> None:
    if not flags.has("--pp_layouts"):
        return
    given = "".join(flags.text("--pp_layouts").split())
    ranks = iter(range(sum(map(sum, widths))))
    # Ranks as a layout numbers them: pipeline by pipeline, stage by stage.
    natural = [[[next(ranks) for _ in range(width)] for width in p] for p in widths]
    if given != "".join(str(natural).split()):
        raise UnsupportedError(
            f"{flags.where('--pp_layouts')}: --pp_layouts numbers the ranks in an order of its "
            "own. Ranks of a layout follow the pipelines; start the machines in that order, or "
            "describe them in cluster.yaml and plan."
        )
