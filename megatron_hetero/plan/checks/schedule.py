"""Invariants of a plan's schedules: launch counts, model chunks, orders of computations.

Whether stages that keep to their orders ever wait for each other in a ring is proved by
`schedule.of_plan.check_schedules`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.checks.violation import Violation, stage_key, stage_name, stages
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.in_flight import num_in_flight
from megatron_hetero.plan.order import Pass, parse_order
from megatron_hetero.plan.plan import Plan, Stage


def launch_counts_feed_the_pipeline(plan: Plan) -> Iterator[Violation]:
    """Find stages that launch fewer forwards than the next stage, a cause of hangs."""
    for r, replica in enumerate(plan.replicas):
        previous: int | None = None
        for s, stage in enumerate(replica.stages):
            key = stage_key(r, s, "num_launched_forwards")
            # An order says by itself when each forward runs, and is checked as a whole.
            if stage.order is not None:
                if stage.num_launched_forwards is not None:
                    yield Violation(
                        key,
                        f"{stage_name(r, s)} has num_launched_forwards and an order, which says it "
                        "already. Set num_launched_forwards to null.",
                    )
                continue
            # Without an order a stage holds as many as it launches: its own count, or 1F1B's.
            count = num_in_flight(plan, r, s)
            if not 1 <= count <= replica.num_micro_batches:
                yield Violation(
                    key,
                    f"{stage_name(r, s)}: num_launched_forwards is {count}; allowed is 1 to the "
                    f"replica's {replica.num_micro_batches} micro-batches.",
                )
            elif previous is not None and count > previous:
                # A stage that launches more waits for forwards that the stage before holds back.
                named = "" if stage.num_launched_forwards is not None else " (1F1B's own)"
                yield Violation(
                    key,
                    f"{stage_name(r, s)}: num_launched_forwards is {count}{named}, more than the "
                    f"{previous} of stage {s - 1}, and the pipeline would deadlock. "
                    f"Allowed is 1 to {previous}.",
                )
            previous = count


def chunks_are_the_stages_layers(plan: Plan) -> Iterator[Violation]:
    """Find model chunks that are empty or do not add up to the layers of the stage."""
    for r, s, stage in stages(plan):
        if not stage.chunks:
            continue
        key, where = stage_key(r, s, "chunks"), stage_name(r, s)
        # A stage's chunks make up the layers that its shape says.
        counts = [chunk.num_layers for chunk in stage.chunks]
        if min(counts) < 1:
            yield Violation(key, f"{where}: a model chunk has {min(counts)} layers; at least 1.")
        elif sum(counts) != stage.shape.num_layers:
            yield Violation(
                key,
                f"{where}: its chunks have {sum(counts)} layers, its shape {stage.shape.num_layers}"
                "; both must be equal.",
            )
        # Chunks are in the order of the layers, and the first one begins the stage.
        firsts = [chunk.first_layer for chunk in stage.chunks]
        if firsts != sorted(firsts) or firsts[0] != stage.first_layer:
            yield Violation(
                key,
                f"{where}: its chunks begin at layers {', '.join(map(str, firsts))}; they must "
                f"ascend from first_layer, which is {stage.first_layer}.",
            )


def chunks_follow_each_other(plan: Plan) -> Iterator[Violation]:
    """Find chunks that leave a gap or repeat layers, neighbours on the same stage, and a first or
    last chunk on the wrong stage."""
    for r, replica in enumerate(plan.replicas):
        # Without chunks `layers_follow_each_other` sees to the replica.
        if not any(stage.chunks for stage in replica.stages):
            continue
        key: tuple[str | int, ...] = ("replicas", r, "stages")
        # All chunks of the replica in the order of the layers.
        pieces = sorted(
            (chunk.first_layer, chunk.num_layers, s)
            for s, stage in enumerate(replica.stages)
            for chunk in stage_chunks(stage)
        )
        due = 0
        for first, num_layers, s in pieces:
            if first != due:
                yield Violation(
                    key,
                    f"replica {r}, stage {s}: a model chunk begins at layer {first}, but layer "
                    f"{due} is due. Let the chunks of all stages follow each other without gaps.",
                )
            due = first + num_layers
        # The same chunks as stages: neighbours differ, the ends are the first and last stage.
        order = [s for *_, s in pieces]
        for a, b in pairwise(order):
            if a == b:
                yield Violation(
                    key,
                    f"replica {r}, stage {a}: two of its model chunks follow each other; make them "
                    "one.",
                )
        if (order[0], order[-1]) != (0, len(replica.stages) - 1):
            yield Violation(
                key,
                f"replica {r}: the first layers are on stage {order[0]} and the last on stage "
                f"{order[-1]}; the embedding has to be on stage 0 and the loss on stage "
                f"{len(replica.stages) - 1}.",
            )


def orders_are_complete(plan: Plan) -> Iterator[Violation]:
    """Find replicas where some stages have an order and others have none, and chunks without an
    order."""
    for r, replica in enumerate(plan.replicas):
        given = [s for s, stage in enumerate(replica.stages) if stage.order is not None]
        chunked = any(stage.chunks for stage in replica.stages)
        # A model of chunks has no 1F1B order that every stage would know by itself.
        if (given or chunked) and len(given) < len(replica.stages):
            missing = next(s for s in range(len(replica.stages)) if s not in given)
            why = "its model chunks need one" if chunked else "other stages have one"
            yield Violation(
                stage_key(r, missing, "order"),
                f"{stage_name(r, missing)} has no order, but {why}. Give every stage of replica "
                f"{r} an order, or none.",
            )
        for s in given:
            for message in _order_faults(replica.stages[s], replica.num_micro_batches):
                yield Violation(stage_key(r, s, "order"), f"{stage_name(r, s)}: order: {message}")
    # The name of a schedule is for people; it must not promise an order that no stage has.
    has_order = any(stage.order is not None for *_, stage in stages(plan))
    if plan.schedule != "1f1b" and not has_order:
        yield Violation(
            ("schedule",),
            f"schedule is {plan.schedule!r}, but no stage has an order, which would be 1F1B. Set "
            'schedule to "1f1b".',
        )


def _order_faults(stage: Stage, num_micro_batches: int) -> Iterator[str]:
    try:
        passes = parse_order(stage.order or "")
    except PlanFormatError as error:
        yield f"{error}."
        return
    num_chunks = len(stage_chunks(stage))
    # Passes name chunks by number, 0 where the text gives none.
    beyond = sorted({chunk for _, chunk in passes if chunk >= num_chunks})
    if beyond:
        yield f"names model chunk {beyond[0]}; the stage has {num_chunks}."
        return
    for chunk in range(num_chunks):
        yield from _chunk_faults(passes, chunk, num_micro_batches)


def _chunk_faults(passes: Sequence[Pass], chunk: int, num_micro_batches: int) -> Iterator[str]:
    """Find passes of a chunk whose count is not the number of micro-batches, or out of order."""
    of = f" of chunk {chunk}" if chunk else ""
    # How many passes of each letter the chunk has so far; its order is checked on the way.
    done: Counter[str] = Counter()
    split = whole = 0
    for letter, at in passes:
        if at != chunk:
            continue
        done[letter] += 1
        # B is a whole backward pass; I is its part for inputs, and W the one for weights.
        split, whole = done["I"], done["B"]
        if split and whole:
            yield f"has B and I{of}; a chunk's backward passes are all whole or all in two parts."
            return
        # The n-th backward needs the n-th forward, as micro-batches go in order.
        if split + whole > done["F"]:
            yield f"has backward pass {split + whole - 1}{of} before its forward."
            return
        if done["W"] > split:
            yield f"has W {done['W'] - 1}{of} before its I."
            return
    # A split backward needs all three letters, a whole one two.
    for wanted in "FIW" if split else "FB":
        if done[wanted] != num_micro_batches:
            yield (
                f"has {done[wanted]} {wanted}{of}; the replica has {num_micro_batches} "
                "micro-batches."
            )


INVARIANTS = (
    chunks_are_the_stages_layers,
    chunks_follow_each_other,
    orders_are_complete,
    launch_counts_feed_the_pipeline,
)
