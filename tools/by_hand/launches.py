"""Operators that the host launches for a pass, and 53 us for each: no pass ends sooner.

Counted from the equations of a layer as docs/cost-model.md says: what one kernel computes counts
once, a product's backward pass twice.
"""

from __future__ import annotations

from tools.by_hand.paper import Job

HOST_S = 53e-6

Counts = tuple[int, int]
"""Forward, backward."""


def core(job: Job, is_old: bool) -> Counts:
    """Count the attention between the projections: one kernel, or scores, softmax, context and a
    copy, with four products, softmax and two scalings on the way back; dropout once each way."""
    if not is_old:
        return 1, 1
    dropped = int(job.attention_dropout)
    return 4 + dropped, 7 + dropped


def layer(job: Job, width: int, is_old: bool) -> Counts:
    """Count two norms, two sums, four products, an activation and the attention, and the
    collectives of a group; biases are separate on old cards."""
    inside, inside_back = core(job, is_old)
    mlps = job.experts or 1
    forward = 2 + 2 + 2 + 3 * mlps + inside
    # The parts of the first projection are put together again.
    backward = 2 + 2 + 4 + 1 + 5 * mlps + inside_back
    if job.experts:  # the router, and the tokens sorted and put back
        forward, backward = forward + 8, backward + 8
    if job.is_rope:
        forward, backward = forward + 2, backward + 2
    if is_old and job.has_bias:
        forward, backward = forward + 1, backward + 4
    if width > 1:
        more = (4, 6) if job.sequence_parallel else (2, 2)
        forward, backward = forward + more[0], backward + more[1]
    return forward, backward


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
