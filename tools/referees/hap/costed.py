"""The prices of a layer's steps on a group of GPUs, taken from the cost model.

Every number is one of `cost`: work of products, norms and core attention, rates of GPUs, links,
bytes of weights, states and activations.  Only how it divides over the steps is said here.  A GPU
that a profile or another price list knows better is scaled by what that says of a whole layer on
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_hetero.cluster.nodes import Device, GpuType
from megatron_hetero.cost.memory.activations import layer_activation_bytes
from megatron_hetero.cost.memory.states import state_bytes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.seconds import slowest_link
from megatron_hetero.cost.parameters import (
    attention_matrices,
    attention_sizes,
    layer_params,
)
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.compute import (
    core_attention_times,
    group_layer_times,
)
from megatron_hetero.cost.work.fused_attention import uses_flash_attention
from megatron_hetero.cost.work.gradient_sums import gradient_accumulation_s
from megatron_hetero.cost.work.layer_work import attention_work, mlp_work
from megatron_hetero.cost.work.products import Product
from megatron_hetero.cost.work.speed import speed_of
from megatron_hetero.cost.work.traffic import KernelTraffic, ends_bytes
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.model.spec import Workload
from megatron_hetero.sequences.price.exchange import all_to_all_s
from tools.referees.hap.layer import WEIGHTS, Part, layer_graph
from tools.referees.hap.prices import Line, ProgramPrices
from tools.referees.hap.states import Dimension, State

_NOTHING = KernelTraffic()


@dataclass(frozen=True)
class LayerGroup:
    """A group of GPUs and what a stage has them do.

    Attributes:
        devices: the GPUs, in rank order.
        num_layers: that they hold.
        num_in_flight: micro-batches whose activations are kept.
        num_micro_batches: of a training step.
        room_bytes: what each GPU has for all layers.
    """

    devices: tuple[Device, ...]
    num_layers: int
    num_in_flight: int
    num_micro_batches: int
    room_bytes: tuple[float, ...]


def check_synthesised(workload: Workload) -> None:
    """Refuse layers that are no attention and MLP of plain products.

    Raises:
        UnsupportedError: the message names the flag.
    """
    model = workload.model
    refused = {
        "--num-experts": model.num_experts > 0 or bool(model.kinds),
        "--multi-latent-attention": model.kv_lora_rank > 0,
    }
    found = [flag for flag, there in refused.items() if there]
    if found:
        raise UnsupportedError(
            f"programs of layers are not synthesised with {' and '.join(found)} yet: their "
            "products are no part of them. Leave out --programs."
        )


def layer_prices(
    costs: CostModel, place: LayerGroup, along: tuple[Dimension, ...], *, by_tokens: bool = False
) -> ProgramPrices:
    """Price the steps of a decoder layer on a group.

    Full recompute repeats a forward pass, collectives and all, and is not part of programs: they
    are priced without it.

    Args:
        costs: of the job.
        place: the group.
        along: dimensions along which work may be divided.
        by_tokens: of programs that divide sequences, which may store no scores where others do.
    Raises:
        UnsupportedError: `check_synthesised`.
    """
    check_synthesised(costs.workload)
    costs = costs.on_devices(place.devices)
    if costs.workload.training.recompute == "full":
        costs = costs.variant(recompute="none")
    cluster, graph = costs.cluster, layer_graph(along)
    gpus = [cluster.gpu_type(device) for device in place.devices]
    side_by_side, workload = "sequences" in along, costs.workload
    if by_tokens and workload.training.fused_scores == "divided":
        training = replace(workload.training, fused_scores="everywhere")
        workload = replace(workload, training=training)
    works = [_works(costs, workload, *pair) for pair in zip(place.devices, gpus, strict=True)]
    lines = {
        (step.name, rule.division): tuple(_line(own[step.name], rule.division) for own in works)
        for step in graph.steps
        if step.computes
        for rule in step.rules
    }
    return ProgramPrices(
        graph,
        lines,
        _tensor_bytes(costs.workload),
        slowest_link(cluster, place.devices),
        all_to_all_s(cluster, place.devices),
        place.num_micro_batches,
        dict(_stored(costs, place)),
        _kept(workload, gpus, place.num_layers * place.num_in_flight),
        place.room_bytes,
        side_by_side,
    )


@dataclass(frozen=True)
class _StepWork:
    """Seconds of a whole step on a GPU: what no share divides but that of whole micro-batches,
    what any share divides, and what only a share of the columns does."""

    fixed_s: float
    divided_s: float
    of_columns_s: float = 0.0

    def times(self, factor: float) -> _StepWork:
        return _StepWork(factor * self.fixed_s, factor * self.divided_s, factor * self.of_columns_s)


def _line(work: _StepWork, division: State) -> Line:
    fixed, divided, of_columns = work.fixed_s, work.divided_s, work.of_columns_s
    match division:
        case "sequences":
            return 0.0, fixed + divided + of_columns
        case "columns":
            return fixed, divided + of_columns
        case "whole":
            return fixed + divided + of_columns, 0.0
    return fixed + of_columns, divided


def _works(
    costs: CostModel, workload: Workload, device: Device, gpu: GpuType
) -> Mapping[str, _StepWork]:
    """Return the work of every step of a layer on one GPU.

    Args:
        costs: of the job.
        workload: the job, as its attention is fused.
        device: the GPU.
        gpu: its type.
    """
    model, training = workload.model, workload.training
    share, speed = even_share(model, 1), speed_of(training, gpu)
    flash = uses_flash_attention(model, training, gpu)
    attention = attention_work(model, training, share, flash)
    mlp = mlp_work(model, training, share, flash)
    ends = ends_bytes(model, training, share)
    between = tuple(
        KernelTraffic(a.num_bytes - b.num_bytes, a.kernels - b.kernels)
        for a, b in zip(mlp.moved, ends, strict=True)
    )

    def moves(own: KernelTraffic) -> _StepWork:
        return _StepWork(speed.kernel_s * own.kernels, speed.memory_s(own.num_bytes))

    def product(own: Product, beside: KernelTraffic = _NOTHING) -> _StepWork:
        overhead_s, more = speed.products.curve.overhead_s, moves(beside)
        divided_s = speed.products_s((own,)) - overhead_s + more.divided_s
        return _StepWork(overhead_s + more.fixed_s, divided_s)

    def gradient(own: Product, num_params: int) -> _StepWork:
        added_s = gradient_accumulation_s(num_params, speed, training)
        return replace(product(own), of_columns_s=added_s)

    def core(at_whole_s: float, at_twice_s: float) -> _StepWork:
        return _StepWork(2 * at_whole_s - at_twice_s, at_twice_s - at_whole_s)

    twice = replace(share, query_groups=2 * share.query_groups)
    once, both = (core_attention_times(workload, [(gpu, own)]) for own in (share, twice))
    again = once.forward_s, both.forward_s
    if training.recompute != "selective":
        again = 0.0, 0.0
    (qkv, proj), (up, down) = attention.products, mlp.products
    params = _matrices(workload)
    made = {
        "norm of attention": moves(attention.moved.forward),
        "query, key, value": product(qkv),
        "core attention": core(once.forward_s, both.forward_s),
        "projection": product(proj),
        "norm of MLP": moves(ends.forward),
        "up": product(up, between[0]),
        "down": product(down),
        "gradient of U": product(down, between[1]),
        "gradient of DOWN": gradient(down, params["mlp"][1]),
        "gradient of M": product(up),
        "gradient of UP": gradient(up, params["mlp"][0]),
        "gradient of norm of MLP": moves(ends.backward),
        "gradient of context": product(proj),
        "gradient of PROJ": gradient(proj, params["attention"][1]),
        "gradient of core attention": core(once.backward_s + again[0], both.backward_s + again[1]),
        "gradient of N": product(qkv),
        "gradient of QKV": gradient(qkv, params["attention"][0]),
        "gradient of norm of attention": moves(attention.moved.backward),
    }
    is_s = costs.group_pieces((device,), None, costs.vocab_rows((1,))).layer.total_s
    factor = is_s / group_layer_times(costs.workload, [(gpu, share)]).total_s
    return {name: work.times(factor) for name, work in made.items()}


def _tensor_bytes(workload: Workload) -> dict[str, float]:
    """Return the bytes of each whole tensor of a micro-batch on its way."""
    model, training = workload.model, workload.training
    share, element = even_share(model, 1), training.element_bytes
    tokens = share.num_tokens(model, training)
    query, key_value = attention_sizes(model, share)
    widths = {
        **dict.fromkeys(("X", "N", "F", "Y", "M", "G"), model.hidden_size),
        "Q": query,
        "KV": 2 * key_value,
        "O": query,
        "U": share.mlp_columns * (2 if model.gated_mlp else 1),
    }
    found: dict[str, float] = {}
    for name, width in widths.items():
        for tensor in (name, f"d{name}"):
            found[tensor] = float(tokens * width * element)
    states = state_bytes(training)
    for part, sizes in _matrices(workload).items():
        for weight, size in zip(WEIGHTS[part], sizes, strict=True):
            found[weight] = float(size * states.weight)
            found[f"d{weight}"] = float(size * states.gradient)
    return found


def _matrices(workload: Workload) -> dict[Part, tuple[int, int]]:
    model = workload.model
    share = even_share(model, 1)
    qkv, proj = attention_matrices(model, share)
    columns = model.hidden_size * share.mlp_columns
    return {"attention": (qkv, proj), "mlp": (columns * (2 if model.gated_mlp else 1), columns)}


def _stored(costs: CostModel, place: LayerGroup) -> Iterator[tuple[tuple[str, State], Line]]:
    """Yield what weights take of a GPU with their gradients and states, as they are stored.

    States that the distributed optimizer divides are those of all holders: of GPUs that keep a
    weight whole as many as there are.
    """
    workload, count = costs.workload, len(place.devices)
    states, all_params = (
        state_bytes(workload.training),
        layer_params(workload.model, even_share(workload.model, 1)),
    )
    matrices = _matrices(workload)
    others = (all_params - sum(map(sum, matrices.values()))) / len(matrices)
    holders = costs.holders.layers
    together = count if workload.training.use_distributed_optimizer else 1
    both = states.weight + states.gradient
    for part, sizes in matrices.items():
        name, size, layers = f"weights of {part}", sum(sizes), place.num_layers
        of_others = layers * others * (both + states.optimizer / holders)
        whole = layers * size * (both + states.optimizer / (holders * together))
        yield (name, "whole"), (of_others + whole, 0.0)
        divided = layers * size * (both + states.optimizer / holders)
        yield (name, "columns"), (of_others, divided)
        # One layer at a time is whole, with its gradients (`cost.memory.device`).
        gathered = size * (states.gradient + max(states.weight, states.gradient))
        yield (name, "elements"), (of_others + gathered, divided)


def _kept(workload: Workload, gpus: Sequence[GpuType], times: int) -> dict[str, float]:
    """Return the bytes that whole tensors take from forward to backward, of `times` layers and
    micro-batches: what `layer_activation_bytes` counts, by what shares of columns divide."""
    model = workload.model
    # Members with all columns keep whole sequences of their own.
    training = replace(workload.training, sequence_parallel=False)
    flash = all(uses_flash_attention(model, training, gpu) for gpu in gpus)
    share = even_share(model, 1)

    def kept(groups: int, columns: int) -> float:
        own = replace(
            share,
            query_groups=groups * share.query_groups,
            mlp_columns=columns * share.mlp_columns,
        )
        return float(layer_activation_bytes(model, training, own, flash, training.recompute))

    both = kept(1, 1)
    attention, mlp = kept(2, 1) - both, kept(1, 2) - both
    outer = (both - attention - mlp) / 4
    query, key_value = attention_sizes(model, share)
    of_token = share.num_tokens(model, training) * training.element_bytes
    key_values, context = 2.0 * key_value * of_token, float(query * of_token)
    found = {
        **dict.fromkeys(("X", "N", "Y", "M"), outer),
        "KV": key_values,
        "O": context,
        "Q": max(0.0, attention - key_values - context),
        "U": mlp,
    }
    return {tensor: times * size for tensor, size in found.items()}
