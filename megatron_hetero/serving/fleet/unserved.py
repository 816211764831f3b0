"""Why no replica serves a class of requests: its length, or which of its deadlines; and what the
figures of a plan leave out."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.serving.compose.problem import ROUTES
from megatron_hetero.serving.fleet.offers import Fleet
from megatron_hetero.serving.fleet.shapes import shapes_of
from megatron_hetero.serving.prices.rates import PhaseRates
from megatron_hetero.serving.prices.served import ServedModel
from megatron_hetero.serving.prices.steps import PipelinePrice
from megatron_hetero.serving.workload.requests import RequestClass, RequestMix
from megatron_hetero.units import format_duration


def beyond_positions(served: ServedModel, mix: RequestMix) -> Iterator[str]:
    """Yield a note on each class with requests that are longer than the model's context."""
    for kind in mix.classes:
        if served.most_tokens is not None and kind.most_tokens > served.most_tokens:
            yield (
                f'class "{kind.name}": its longest request has {kind.most_tokens:,} tokens, and '
                f"the model {served.most_tokens:,} positions (max_position_embeddings): engines "
                "refuse such requests, and the figures count them as served"
            )


def not_stored(served: ServedModel) -> Iterator[str]:
    """Yield a note on weights in a format that engines cannot make of the checkpoint's."""
    # Weights of 16 bits are made fp8 as they are loaded; int4 needs a calibrated checkpoint.
    if served.weights == "int4" and not served.is_quantized:
        yield (
            f"{served.source} has no quantization_config: engines load 16-bit weights from it; for "
            "this plan give them a checkpoint in int4 (AWQ, GPTQ)"
        )


def unread_limits(limits: Limits) -> Iterator[str]:
    """Yield a note on limits of cluster.yaml that a fleet does not keep to."""
    # Tensor-parallel groups never leave a machine here.
    nodes = [n for n in limits.no_tensor_parallel_across if n not in ("nodes", "sites")]
    given = {
        "num_replicas": limits.num_replicas,
        "first_stage": limits.first_stage_nodes,
        "last_stage": limits.last_stage_nodes,
        "no_tensor_parallel_across": nodes,
        "no_data_parallel_across_sites": limits.no_data_parallel_across_sites,
        "as_given": limits.as_given,
    }
    names = [name for name, value in given.items() if value]
    if names:
        yield (
            "limits of cluster.yaml that hold for training alone, and not for this plan: "
            f"{', '.join(names)}"
        )


def refuse_unserved(fleet: Fleet) -> None:
    """Refuse a workload with a class that no replica serves, and say what of it is too much.

    Raises:
        InfeasiblePlanError: a class whose longest request fits no replica, or with a deadline that
            the quickest replica misses with a single request.
    """
    for number, kind in enumerate(fleet.mix.classes):
        phases = {o.phase for o in fleet.offered.values() if o.by_class[number].per_s > 0}
        if not any(phases.issuperset(route) for route in ROUTES):
            reason = _reason(fleet, kind)
            raise InfeasiblePlanError(
                f'no replica on these GPUs can serve class "{kind.name}": {reason}'
            )


def _reason(fleet: Fleet, kind: RequestClass) -> str:
    every = [
        PhaseRates(PipelinePrice(shape.pipeline, fleet.served, fleet.engine))
        for shape in shapes_of(fleet.cluster, fleet.pools, fleet.served, fleet.engine)
    ]
    most = max(rates.pool.longest for rates in every)
    if kind.most_tokens > most:
        return (
            f"its longest request has {kind.most_tokens:,} tokens, and the largest replica holds "
            f"keys and values of {most:,.0f} beside the weights; shorten input or output, take "
            "--kv fp8 or fewer bytes for a weight (--weights), or larger GPUs"
        )
    # Deadlines, each by the replica that is quickest with one request.
    roomy = [rates for rates in every if rates.pool.longest >= kind.most_tokens]
    first_s = min(rates.first_token_s(kind) for rates in roomy)
    if first_s > kind.first_token_s:
        return _too_tight("first_token", kind.first_token_s, first_s)
    between_s = min(rates.alone_between_s(kind) for rates in roomy)
    if between_s > kind.between_tokens_s:
        return _too_tight("between_tokens", kind.between_tokens_s, between_s)
    return (
        "one replica keeps first_token and another between_tokens, but none both, and engines "
        "hand no keys and values over between these; give one of the two more time"
    )


def _too_tight(key: str, deadline_s: float, least_s: float) -> str:
    return (
        f"{key} is {format_duration(deadline_s)}, and a request that is alone takes "
        f"{format_duration(least_s)} on the quickest replica; give it more time, or faster GPUs"
    )
