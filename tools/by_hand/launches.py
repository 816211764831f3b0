"""Work of the host for a pass, in operators of 53 us: no pass ends sooner.

Counted from the equations of a layer and the table of docs/cost-model.md: a module of Transformer
Engine takes what was measured of its Python, and 0.2 for each kernel behind it; an operator of
Megatron's own counts once.
"""

from __future__ import annotations

from tools.by_hand.paper import Job

HOST_S = 53e-6
_KERNEL = _HOOK = 0.2

Counts = tuple[float, float]
"""Forward, backward."""

_NORM_LINEAR = 3.8 + 2 * _KERNEL, 4.1 + 3 * _KERNEL
_LINEAR = 3.2 + _KERNEL, 4.1 + 2 * _KERNEL
_NORM = 4.8 + _KERNEL, 4.0 + _KERNEL
_ATTENTION = 11.2 + _KERNEL, 2.5 + _KERNEL
_EXPERT = 2.2 + 2 * _KERNEL, 4.4 + 4 * _KERNEL
_ROUTING = 17.5, 8.5


def core(job: Job, is_old: bool) -> Counts:
    """Count the attention between the projections: one kernel, or scores, softmax, context and a
    copy, with four products, softmax and two scalings on the way back; dropout once each way."""
    dropped = int(job.attention_dropout)
    kernels = (4 + dropped, 7 + dropped) if is_old else (1, 1)
    if job.is_local:
        return kernels
    return _sum([_ATTENTION, kernels]) if is_old else _ATTENTION


def layer(job: Job, width: int, is_old: bool) -> Counts:
    """Count two norms, two sums, four products, an activation and the attention, and the
    collectives of a group; biases are separate in local layers."""
    # A sum after each half; backward the parts of the first projection are put together again.
    parts: list[Counts] = [core(job, is_old), (2, 2), (0, 1)]
    number = job.experts or 1
    parts += [(1, 1)] * number
    if job.is_local:
        parts += [(2, 4), (2, 2), *[(2, 4)] * number]
    elif job.experts:
        parts += [_NORM_LINEAR, _LINEAR, _NORM, *[_EXPERT] * number]
    else:
        parts += [_NORM_LINEAR, _LINEAR] * 2
    if job.experts:
        parts.append(_ROUTING)
    if job.is_rope:
        parts.append((2, 2))
    if job.is_local and job.has_bias:
        parts.append((1, 4))
    if width > 1:
        parts.append((4, 6) if job.sequence_parallel else (2, 2))
    return _sum(parts)


def hooks(job: Job) -> float:
    """Count the hooks of data parallelism in a layer: one for each matrix and each norm; that of a
    norm adds the gradient."""
    matrices = 2 + 2 * (job.experts or 1) + (1 if job.experts else 0)
    return (matrices + 2) * _HOOK + 2 * _KERNEL


def _sum(parts: list[Counts]) -> Counts:
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def words(job: Job, width: int) -> Counts:
    """Count the look-up of words, that of positions and their sum, dropout, and the group's sum."""
    forward, backward = (1, 1) if job.is_rope else (3, 2)
    dropped, grouped = int(job.hidden_dropout), int(width > 1)
    return forward + dropped + grouped, backward + dropped + grouped * job.sequence_parallel


def head(job: Job, width: int) -> Counts:
    """Count norm, product and loss: 20 and 11, and in a group three sums and one back."""
    if width == 1:
        return 20, 11
    return 23 + job.sequence_parallel, 12 + job.sequence_parallel
