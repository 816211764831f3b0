"""FLOPs of a step, and bytes on each GPU: weights, gradients, states, activations, messages."""

from __future__ import annotations

from dataclasses import dataclass

from tools.by_hand.gpus import GPUS, Gpu
from tools.by_hand.paper import Job, Paper, Replica, Stage
from tools.by_hand.site import Site

_HOPPER_ON = {"H100-80GB", "H100-PCIe", "RTX-5090"}


def model_flops(job: Job, rows: int) -> float:
    """Count the FLOPs of a step: two for each weight that a token meets and each score of the
    causal half, three times for forward and backward."""
    mlps = job.top_k if job.experts else 1
    router = job.hidden * job.experts
    weights = job.attention_weights + mlps * job.mlp_weights + router
    products = 2 * job.sequence * (job.layers * weights + rows * job.hidden)
    scores = 2 * job.layers * job.sequence**2 * job.query
    return 3.0 * job.batch * (products + scores)


@dataclass(frozen=True)
class Held:
    """Parameters on one GPU of a stage: of one layer, of the embedding's side, of the head."""

    layer: float
    words: float
    positions: float
    final_norm: float
    output: float


def held(paper: Paper, stage: Stage, member: int) -> Held:
    """Return what member `member` of a stage's group holds."""
    job = paper.job
    by_head, by_column = job.divided_layer
    layer = (
        by_head * stage.parts(job.groups)[member] / job.groups
        + by_column * stage.parts(job.ffn)[member] / job.ffn
        + job.whole_layer
    )
    rows = paper.rows * job.hidden * stage.shares[member] / sum(stage.shares)
    is_first, is_last = stage.first == 0, stage.end == job.layers
    return Held(
        layer,
        rows if is_first else 0.0,
        job.positions * job.hidden if is_first and not job.is_rope else 0.0,
        job.norm_vectors * job.hidden if is_last else 0.0,
        rows if is_last and not (job.is_tied and is_first) else 0.0,
    )


def bytes_of_parameter(job: Job) -> tuple[int, int, int]:
    """Return the bytes of weight, gradient and Adam's states: bf16 adds its gradients in fp32, fp16
    in fp16 (Megatron's mixed-precision optimizer)."""
    return {"bf16": (2, 4, 12), "fp16": (2, 2, 12), "fp32": (4, 4, 8)}[job.precision]


def copy_for_update(job: Job) -> int:
    """Return the bytes of a parameter's gradient in fp32 that fp16 copies for the update alone."""
    return 4 if job.precision == "fp16" else 0


def holders_of_layer(paper: Paper, layer: int) -> list[Stage]:
    """Find the stage of each replica that has a layer."""
    return [s for r in paper.replicas for s in r.stages if s.first <= layer < s.end]


def _own_part(paper: Paper, stage: Stage, holders: list[Stage]) -> float:
    """Return the part of the states that a GPU keeps of what several stages hold."""
    if not paper.job.divides_states:
        return 1.0
    return stage.state_share / sum(holder.state_share for holder in holders)


def layer_activations(
    job: Job, tokens: int, part: tuple[float, float], gpu: Gpu, width: int, recompute: str
) -> float:
    """Count the bytes that a layer keeps of a micro-batch of `tokens` tokens.

    Korthikanti et al. 2022, eq. 2 without the scores that flash attention does not keep, for any
    number of key heads and MLP.  `part`: of the heads and of the MLP's columns.
    """
    own = tokens / (width if job.sequence_parallel else 1)
    if recompute == "full":
        return own * job.hidden * job.element
    heads, columns = part
    norms = 4 * own * job.hidden * job.element  # both norms' inputs and outputs
    norms += 2 * own * 4 * job.norm_vectors
    masks = 2 * own * job.hidden if job.hidden_dropout else 0
    attention = tokens * heads * (2 * job.query + 2 * job.key) * job.element
    if recompute != "selective":
        if gpu.is_old:
            scores = tokens * heads * job.heads * job.sequence
            attention += scores * (2 * job.element + 1 if job.attention_dropout else job.element)
        else:
            attention += 4 * tokens * heads * job.heads
    mlp_elements = (3 if job.matrices == 3 else 2) * job.ffn * columns
    if job.experts:
        mlp = tokens * job.top_k * ((job.hidden + mlp_elements) * job.element + 18)
        mlp += own * (12 * job.top_k + 8 * job.experts + 4) + tokens * job.experts
    else:
        mlp = tokens * mlp_elements * job.element
    return norms + masks + attention + mlp


def bytes_not_of_tensors(site: Site, replica: Replica, index: int, member: int) -> float:
    """Sum what CUDA and NCCL keep of a GPU.

    666.6 MB for PyTorch's kernels; 4 MiB of workspace, 32 from Hopper on, for each of cuBLAS,
    cuBLASLt and Transformer Engine; 9.19 MiB for each connection of each NCCL channel, of which
    groups of two have 2, larger ones 3, neighbours 1 each, gradients and the whole job 3 each.
    """
    stage = replica.stages[index]
    node = stage.devices[member].partition(":")[0]
    name, total = site.gpu(stage.devices[member]), 666.6e6
    total += 3 * (32 if name in _HOPPER_ON else 4) * 2**20
    if sum(int(n["count"]) for n in site.nodes.values()) == 1:
        return total
    channels = 2.0
    if site.nodes[node]["count"] > 1:
        channels = min(24, 2 * max(1, site.inside(node)[0] // 25e9))
    connections = 6 + (index > 0) + (index + 1 < len(replica.stages))
    connections += {1: 0, 2: 2}.get(stage.width, 3)
    return total + connections * channels * 9.19 * 2**20


def device_bytes(paper: Paper, site: Site, replica: Replica, index: int, member: int) -> float:
    """Sum all bytes on one GPU at its fullest."""
    job, stage = paper.job, replica.stages[index]
    gpu = GPUS[site.gpu(stage.devices[member])]
    has = held(paper, stage, member)
    weight, gradient, states = bytes_of_parameter(job)
    params = has.layer * stage.layers + has.words + has.positions + has.final_norm + has.output
    if site.reserve is not None:
        total = float(site.reserve)
    else:
        total = bytes_not_of_tensors(site, replica, index, member)
        total += max(1.5e9, 1e9 + _largest_tensor(paper, replica, index, member, gpu))
    total += params * (weight + gradient)

    layers = range(stage.first, stage.end)
    kept = sum(_own_part(paper, stage, holders_of_layer(paper, layer)) for layer in layers)
    owned = has.layer * kept
    firsts = [r.stages[0] for r in paper.replicas]
    lasts = [r.stages[-1] for r in paper.replicas]
    words = firsts + [s for s in lasts if s not in firsts] if job.is_tied else firsts
    owned += has.words * _own_part(paper, stage, words)
    owned += has.positions * _own_part(paper, stage, firsts)
    owned += has.output * _own_part(paper, stage, words if job.is_tied else lasts)
    owned += has.final_norm * _own_part(paper, stage, lasts)
    total += states * owned
    # The update has copies of gradients where passes have activations.
    passing = _bytes_of_passes(paper, replica, index, member, gpu, has)
    return total + max(passing, owned * copy_for_update(job))


def _largest_tensor(paper: Paper, replica: Replica, index: int, member: int, gpu: Gpu) -> float:
    """Return the bytes of the largest of: what an MLP's first product gives, scores, logits."""
    job, stage = paper.job, replica.stages[index]
    tokens = replica.size * job.sequence
    heads = stage.parts(job.groups)[member] / job.groups * job.heads
    columns = stage.parts(job.ffn)[member] * (job.matrices - 1)
    sizes: list[float] = [tokens * job.hidden * job.element]
    sizes.append(tokens * max(1, job.top_k) * columns * job.element)
    if gpu.is_old:
        sizes.append(tokens * heads * job.sequence * job.element)
    if stage.end == job.layers:
        sizes.append(4 * tokens * paper.rows * stage.shares[member] / sum(stage.shares))
    return max(sizes)


def _bytes_of_passes(
    paper: Paper, replica: Replica, index: int, member: int, gpu: Gpu, has: Held
) -> float:
    """Sum the activations, working set and messages of a GPU while passes are computed."""
    job, stage = paper.job, replica.stages[index]
    tokens = replica.size * job.sequence
    own = tokens / (stage.width if job.sequence_parallel else 1)
    part = (
        stage.parts(job.groups)[member] / job.groups,
        stage.parts(job.ffn)[member] / job.ffn,
    )
    plain = layer_activations(job, tokens, part, gpu, stage.width, "none")
    again = layer_activations(job, tokens, part, gpu, stage.width, stage.recompute)
    in_flight = stage.recomputed * again + (stage.layers - stage.recomputed) * plain
    logits = tokens * paper.rows * stage.shares[member] / sum(stage.shares)
    if has.words and job.hidden_dropout:
        in_flight += own * job.hidden
    if stage.end == job.layers:
        in_flight += 2 * own * job.hidden * job.element + 4 * logits

    # Of experts one at a time is at work, on its part of the rows.
    rows = tokens * (job.top_k if job.experts else 1)
    wide = rows / max(job.experts, 1) * part[1] * job.ffn * job.matrices
    working = job.element * (wide + 2 * rows * job.hidden)
    if gpu.is_old:
        scores = tokens * part[0] * job.heads * job.sequence
        working = max(working, 2 * scores * job.element)
    if stage.recompute != "none" and stage.recomputed:
        working += plain - again
    if stage.end == job.layers and job.element < 4:
        working = max(working, logits * job.element)
    messages = _messages(replica, index) * own * job.hidden * job.element
    return stage.ahead * in_flight + working + messages


def _messages(replica: Replica, index: int) -> int:
    """Count the tensors to and from neighbours that a stage keeps: one for each neighbour, sends
    that may be under way as long as forwards run ahead, and receives posted as far ahead."""
    ahead = [stage.ahead for stage in replica.stages]
    neighbours = (index > 0) + (index + 1 < len(ahead))
    if all(n == min(len(ahead) - i, replica.micro_batches) for i, n in enumerate(ahead)):
        return 2 * neighbours
    count = neighbours
    if index + 1 < len(ahead):
        count += ahead[index] + max(ahead[index] - ahead[index + 1], 0)
    if index:
        count += ahead[index - 1] + max(ahead[index - 1] - ahead[index], 0)
    return count
