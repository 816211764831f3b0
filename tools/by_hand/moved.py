"""What a layer reads and writes beside its products, by hand (docs/cost-model.md, "What operators
move"): bytes of both passes, then kernels of both."""

from __future__ import annotations

from tools.by_hand.paper import Job

KERNEL_US = 2.1
"""Of each kernel, beside its bytes."""
ROUTER = 18, 10
"""Kernels of a router."""

Sums = tuple[float, float, float, float]


def of_halves(job: Job, own: float) -> Sums:
    """Sum two norms (one reads, the other writes; backward a gradient comes too), and two sums of
    what came in and what was made of it, with dropout and bias.

    `own`: tokens on the card.
    """
    dropped, e = int(job.hidden_dropout), job.element
    forward = 2 * (2 * e + 3 * e + dropped)
    backward = 2 * (3 * e + 3 * e + dropped * (2 * e + 1) + job.has_bias * e)
    # The weights of a norm (a layer norm has two), and biases, are added to their main gradients.
    back = 2 * (2 + job.norm_vectors + dropped + 2 * job.has_bias)
    return own * job.hidden * forward, own * job.hidden * backward, 4, back


def of_heads(job: Job, tokens: float, groups: int, heads: float, is_old: bool) -> Sums:
    """Sum what is done to queries, keys and values on a card with `groups`, a part `heads` of all;
    `is_old`: scores are stored."""
    query, key = heads * job.query, heads * job.key
    shared = job.heads > job.groups
    # Backward three gradients become one.
    forward, backward = 0.0, 2 * (query + 2 * key)
    there, back = 0, 1
    if job.is_rope:
        forward, backward = forward + 2 * (query + key), backward + 2 * (query + key)
        there, back = there + 2, back + 2
    if shared and groups > 1:
        forward += 2 * query
        there += 1
    if is_old:
        # The context is copied, and keys and values for each of their queries.
        both = 2 * query + (2 * (query + key) if shared else 0)
        forward, backward = forward + both, backward + both
        there, back = there + (3 if shared else 1), back + (3 if shared else 1)
    elif job.is_rope:
        forward += 2 * key
        there += 1
    elif shared:
        forward += 4 * key
        there += 2
    if job.has_bias:
        backward += (query + 2 * key) if job.is_local else 0
        back += 2 if job.is_local else 1
    return tokens * forward * job.element, tokens * backward * job.element, there, back


def of_mlp(job: Job, tokens: float, own: float, columns: float) -> Sums:
    """Sum an activation, of each expert's rows where there are experts, and what sorts the rows.

    Args:
        job: what is trained.
        tokens, own: of the group, and of the card.
        columns: that the activation gives, on the card.
    """
    gated, rows = job.matrices == 3, tokens * max(job.top_k, 1)
    taken, back = (3, 5) if gated else (2, 3)
    if job.has_bias and not job.experts:
        back += 2 if gated else 1
    forward, backward = taken * rows * columns, back * rows * columns
    kernels = kernels_back = max(job.experts, 1)
    if job.has_bias and not job.experts:
        kernels_back += 2
    if job.experts:
        # Each row is taken out of its token and written, put back by adding to zeros, and put
        # together with those of the other experts; backward the router's gradient is one more.
        sorted_rows = (2 + 3 + 2 * (job.experts > 1)) * rows + tokens
        forward += sorted_rows * job.hidden
        backward += (sorted_rows + 3 * own) * job.hidden
        sorting = 3 + (job.experts > 1)
        kernels, kernels_back = (
            kernels + sorting + ROUTER[0],
            kernels_back + sorting + 1 + ROUTER[1],
        )
    return forward * job.element, backward * job.element, kernels, kernels_back
