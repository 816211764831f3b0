"""Seconds of a step: stages by peaks and bandwidths, the pipeline, exchange and update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import log

from tools.by_hand import launches, moved
from tools.by_hand.gpus import CALL_US, EXTRA_TOKENS, GPUS, NVLINKS, Nvlink
from tools.by_hand.memory import bytes_of_parameter, copy_for_update, held, holders_of_layer
from tools.by_hand.paper import Paper, Replica, Stage
from tools.by_hand.site import Site
from tools.by_hand.traffic import Load, exchanges, loads


@dataclass(frozen=True)
class _Pass:
    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class _Parts:
    """Passes of a stage's parts: a layer, one that is recomputed, both ends of the model."""

    layer: _Pass
    again: _Pass
    words: _Pass
    head: _Pass


def stage_pass(paper: Paper, site: Site, replica: Replica, stage: Stage) -> _Pass:
    """Time a micro-batch, forward and backward: each part on the slowest member of a group, with
    its communication, and no faster than the host launches it."""
    job = paper.job
    members = [_member_pass(paper, site, replica, stage, m) for m in range(stage.width)]
    is_old = any(GPUS[site.gpu(device)].is_old for device in stage.devices)
    width = stage.width
    gathered = reduce = given = loss = 0.0
    column = stage_columns(paper, site, replica, stage)
    if width > 1:
        size = replica.size * job.sequence * job.hidden * job.element
        gathered = _collective_s(site, stage.node, size, width, 1)
        reduce = _collective_s(site, stage.node, size, width, 2)
        # With sequence parallelism a sum is scattered, and what is taken in gathered.
        given = 2 * gathered if job.sequence_parallel else reduce
        tokens = 4 * replica.size * job.sequence
        loss = 3 * _collective_s(site, stage.node, tokens, width, 2)

    def back(product: float | None) -> float:
        """Exchanges of half a layer backward, or of the head, where a product hides them: over
        NVLink."""
        hides = width > 1 and _nvlink(site, stage.node) is not None
        hidden = (product or 0.0) if hides else 0.0
        if job.sequence_parallel:
            return 2 * max(0.0, gathered - hidden)
        return max(0.0, reduce - hidden)

    output = gathered if job.sequence_parallel else 0.0

    def slowest(part: str, more: tuple[float, float], counts: launches.Counts) -> _Pass:
        found = [getattr(member, part) for member in members]
        return _Pass(
            max(max(p.forward for p in found) + more[0], launches.HOST_S * counts[0]),
            max(max(p.backward for p in found) + more[1], launches.HOST_S * counts[1]),
        )

    counts = launches.layer(job, width, is_old)
    # With the hooks of its weights a pass takes longer; a pass that is done again has no hooks.
    hooked = counts[0], counts[1] + launches.hooks(job)
    # Attention and the MLP; of experts nothing hides, and tokens are not gathered once more.
    of_mlp = gathered if job.experts and job.sequence_parallel else back(column.mlp)
    more = 2 * given, 2 * output + back(column.attention) + of_mlp
    full = stage.recompute == "full"
    repeated = counts[0] if full else launches.core(job, is_old)[0]
    kept = slowest("layer", more, hooked)
    again = slowest(
        "again", (more[0], more[1] + 2 * given * full), (hooked[0], hooked[1] + repeated)
    )
    num_again = stage.recomputed if stage.recompute in ("full", "selective") else 0
    forward = (stage.layers - num_again) * kept.forward + num_again * again.forward
    backward = (stage.layers - num_again) * kept.backward + num_again * again.backward
    if stage.first == 0:
        words = slowest("words", (output or reduce, 0.0), launches.words(job, width))
        forward, backward = forward + words.forward, backward + words.backward
    if stage.end == job.layers:
        head = slowest("head", (loss + output, back(column.head)), launches.head(job, width))
        forward, backward = forward + head.forward, backward + head.backward
    return _Pass(forward, backward)


@dataclass(frozen=True)
class _Columns:
    """Seconds of column-parallel products of the member that computes least: qkv, fc1 (None of
    experts), output."""

    attention: float
    mlp: float | None
    head: float


def stage_columns(paper: Paper, site: Site, replica: Replica, stage: Stage) -> _Columns:
    """Time the products under which backward exchanges hide."""
    job, tokens = paper.job, replica.size * paper.job.sequence
    found = []
    for member, device in enumerate(stage.devices):
        gpu = GPUS[site.gpu(device)]
        heads = stage.parts(job.groups)[member] / job.groups
        columns = stage.parts(job.ffn)[member] / job.ffn
        outputs = (
            heads * (job.query + 2 * job.key),
            (job.matrices - 1) * job.ffn * columns,
            paper.rows * stage.shares[member] / sum(stage.shares),
        )
        found.append([gpu.product_s(tokens, job.hidden, n, job.element) for n in outputs])
    attention, mlp, head = (min(own) for own in zip(*found, strict=True))
    return _Columns(attention, None if job.experts else mlp, head)


def _collective_s(site: Site, node: str, size: float, cards: int, passes: int) -> float:
    """Time a collective inside a node: over NVLink as measured, else a ring's rounds."""
    speed, latency = site.inside(node)
    if nvlink := _nvlink(site, node):
        return nvlink.seconds(size, cards, passes, speed)
    return passes * (cards - 1) * (latency + size / cards / speed)


def _nvlink(site: Site, node: str) -> Nvlink | None:
    """Constants of a node's NVLink; None where its GPUs are joined by something slower."""
    speed, _ = site.inside(node)
    return NVLINKS.get(site.gpu(node)) if speed > 64e9 else None


def _member_pass(paper: Paper, site: Site, replica: Replica, stage: Stage, member: int) -> _Parts:
    """Time a member's passes without communication: products at the rate that they reach of the
    peak, the rest at the memory's; backward twice the products, and 8 bytes for each weight's
    gradient."""
    job = paper.job
    gpu = GPUS[site.gpu(stage.devices[member])]
    rate, memory = gpu.reached * gpu.tflops * 1e12, gpu.streamed * gpu.gb_per_s * 1e9
    if job.precision == "fp32":
        raise ValueError("fp32 peaks are not on the sheet")
    e = job.element
    heads = stage.parts(job.groups)[member] / job.groups
    columns = stage.parts(job.ffn)[member] / job.ffn
    tokens = replica.size * job.sequence
    own = tokens / (stage.width if job.sequence_parallel else 1)

    mlps = job.top_k if job.experts else 1
    query, key = heads * job.query, heads * job.key
    gates = (job.matrices - 1) * job.ffn * columns
    rows_of_mlp = tokens * mlps / max(job.experts, 1)
    mlp = gpu.product_s(rows_of_mlp, job.hidden, gates, e)
    mlp += gpu.product_s(rows_of_mlp, job.ffn * columns, job.hidden, e)
    products = gpu.product_s(tokens, job.hidden, query + 2 * key, e)
    products += gpu.product_s(tokens, query, job.hidden, e) + max(job.experts, 1) * mlp
    if job.experts:
        products += gpu.product_s(own, job.hidden, job.experts, e)
    parts = (
        moved.of_halves(job, own),
        moved.of_heads(job, tokens, stage.parts(job.groups)[member], heads, gpu.is_old),
        moved.of_mlp(job, tokens, own, job.ffn * columns),
    )
    there, back_there, *kernels = (sum(each) for each in zip(*parts, strict=True))
    fixed, fixed_back = (number * moved.KERNEL_US * 1e-6 for number in kernels)
    rest, rest_back = there / memory + fixed, back_there / memory + fixed_back
    scores = tokens * heads * job.heads * job.sequence
    two = 4 * scores * job.head_size * (1.0 if gpu.is_old else 0.5) / rate
    _, forth, back = min(gpu.fused, key=lambda own: abs(log(own[0] / job.head_size)))
    longer, longer_back = (1 + extra / job.sequence for extra in EXTRA_TOKENS)
    call, call_back = (us * 1e-6 for us in CALL_US)
    core, core_back = two * longer / forth + call, 2.5 * two * longer_back / back + call_back
    if gpu.is_old:
        two += 2 * gpu.product_us * 1e-6
        # Unfused: 3.78 and 5.68 elements moved for each score (docs/cost-model.md), dropout more.
        dropped = scores * (2 * e + 1) if job.attention_dropout else 0.0
        core = two + (3.78 * scores * e + 1.19 * dropped) / memory
        core_back = 2 * two + (5.68 * scores * e + dropped) / memory
    layer = products + rest + core
    has = held(paper, stage, member)
    matrices = has.layer - job.whole_layer
    # Main gradients are read and written.
    _, main, _ = bytes_of_parameter(job)
    layer_back = 2 * products + rest_back + core_back + 2 * main * matrices / memory
    again = {"full": layer, "selective": core}.get(stage.recompute, 0.0)
    rows = paper.rows * job.hidden * stage.shares[member] / sum(stage.shares)
    words = 3 * tokens * job.hidden * e / memory
    logits = tokens * rows / job.hidden
    output = gpu.product_s(tokens, job.hidden, rows / job.hidden, e)
    # The loss: logits to fp32, a maximum that is subtracted, exponents, a sum that divides.
    # Backward the logits are multiplied, and written as they were read.
    mixed = min(gpu.mixed_gb_per_s * 1e9, memory)
    loss = logits * (4 + e + 32) / mixed
    loss_back = logits * (4 + e + 8) / mixed
    return _Parts(
        _Pass(layer, layer_back),
        _Pass(layer, layer_back + again),
        # The gradient of every word is written, and then added to the main one.
        _Pass(words, 2 * words + e * rows / memory + (2 * main + e) * rows / mixed),
        _Pass(
            output + 2 * tokens * job.hidden * e / memory + loss,
            2 * output
            + (3 * tokens * job.hidden * e + 2 * main * rows) / memory
            + loss_back
            # Both gradients of a tied weight on one stage: zeros are written, and they are added.
            + (4 * e * rows / memory if job.is_tied and stage.layers == job.layers else 0.0),
        ),
    )


@dataclass(frozen=True)
class StepByHand:
    """`stages_s` is [replica][stage]; `slowest_s` is for how long the slowest stage computes.
    `is_of_trips`: micro-batches go to the last stage and back, as many at once as a stage launches
    ahead, for longer than any stage fills, works, waits and drains."""

    stages_s: list[list[float]]
    pipelines_s: float
    exchange_s: float
    update_s: float
    slowest_s: float
    is_of_trips: bool

    @property
    def step_s(self) -> float:
        """Sum the seconds of the step."""
        return self.pipelines_s + self.exchange_s + self.update_s


def exchange_seconds(paper: Paper, site: Site, is_stock: bool) -> dict[int, float]:
    """Time the exchange of the first stage of each replica, which ends last: the busiest path."""
    found = {}
    for r, replica in enumerate(paper.replicas):
        first = replica.stages[0]
        inside, between = 0.0, list[Load]()
        for holders, load in exchanges(paper, is_stock):
            if first in holders:
                between.append(load)
                inside += _ports_s(site, holders, load)
        outside = max((s for _, s in loads(site, *between).values()), default=0.0)
        found[r] = max(inside, outside)
        if paper.job.overlaps:  # all but the first layer's go while the last backward pass runs
            passes = stage_pass(paper, site, replica, first)
            hidden = passes.backward * (1 - 1 / first.layers)
            found[r] = max(found[r] - hidden, found[r] / first.layers)
    return found


def _ports_s(site: Site, holders: list[Stage], load: Load) -> float:
    """Return the seconds for which an exchange takes the ports of GPUs, which divide what stays in
    a node."""
    seconds = 0.0
    for (here, there), size in load.items():
        if here == there:
            ports = sum(holder.width for holder in holders if holder.node == here)
            seconds = max(seconds, size / ports / site.inside(here)[0])
    return seconds


def step_by_hand(paper: Paper, site: Site, exchange_s: dict[int, float]) -> StepByHand:
    """Time the slowest pipeline, the part of the exchange that its bubbles do not hide, and the
    update.

    Args:
        exchange_s: seconds that the exchange of a replica's first stage takes after it.
    """
    stages_s, pipelines, busiest, is_of_trips = [], [], 0.0, False
    for replica in paper.replicas:
        passes = [stage_pass(paper, site, replica, stage) for stage in replica.stages]
        stages_s.append([p.both for p in passes])
        bounds_s, trips_s = zip(*_pipeline(paper, site, replica, passes), strict=True)
        pipelines.append(max(*bounds_s, *trips_s))
        is_of_trips |= max(trips_s) > max(bounds_s)
        busiest = max(busiest, replica.micro_batches * max(p.both for p in passes))
    update = max(
        _update(paper, site, stage, member)
        for replica in paper.replicas
        for stage in replica.stages
        for member in range(stage.width)
    )
    slowest = max(pipelines)
    exposed = max(
        (pipelines[r] + seconds - slowest for r, seconds in exchange_s.items()), default=0.0
    )
    exposed = max(0.0, exposed)
    return StepByHand(stages_s, slowest, exposed, update, busiest, is_of_trips)


def _pipeline(
    paper: Paper, site: Site, replica: Replica, passes: list[_Pass]
) -> Iterator[tuple[float, float]]:
    """Yield for each stage the sum of filling, its own work, its waiting for the stages behind it,
    and draining; and the seconds of all round trips."""
    size = replica.size * paper.job.sequence * paper.job.hidden * paper.job.element
    hops = []
    for before, after in pairwise(replica.stages):
        if before.node == after.node:
            speed, latency = site.inside(before.node)
            most = max(before.width, after.width)
            hops.append(latency + size / speed / min(before.width, after.width, most))
        else:
            path = site.between(before.node, after.node)
            hops.append(path.late_s + size / path.speed)
    count = replica.micro_batches
    for s, own in enumerate(passes):
        fill_s = sum(p.both for p in passes[:s]) + 2 * sum(hops[:s])
        behind = sum(p.both for p in passes[s + 1 :]) + 2 * sum(hops[s:])
        ahead = replica.stages[s].ahead
        waits = max(0.0, behind - (ahead - 1) * own.forward)
        waits += max(0.0, behind - (ahead - 1) * own.backward)
        round_trips = count / ahead * (own.both + behind)
        yield fill_s + count * own.both + min(waits, behind), fill_s + round_trips


def _update(paper: Paper, site: Site, stage: Stage, member: int) -> float:
    """Time the update.

    Gradients are zeroed, checked and, of several owners, scaled; each owner reads its own twice
    (or copies them first, and reads the copies), with Transformer Engine scales them again, reads
    and writes its states, reads a weight, and writes it in two precisions.
    """
    gpu, job = GPUS[site.gpu(stage.devices[member])], paper.job
    has = held(paper, stage, member)
    params = has.layer * stage.layers + has.words + has.positions + has.final_norm + has.output
    part, is_scaled = 1.0, False
    if job.divides_states:
        owners = holders_of_layer(paper, stage.first)
        part = stage.state_share / sum(holder.state_share for holder in owners)
        is_scaled = len(owners) > 1
    weight, gradient, states = bytes_of_parameter(job)
    copy, uses = copy_for_update(job), 2 if job.is_local else 4
    own = (1 + uses) * copy + (1 if copy else uses) * gradient + 2 * states + 3 * weight
    each = (4 if is_scaled else 2) * gradient + part * own
    return params * each / (gpu.streamed * gpu.gb_per_s * 1e9)
