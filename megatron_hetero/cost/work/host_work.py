"""Work of the host beyond what it launches, in units of an operator: a table of Python's own time.

An operator is the unit of `launch_time`: a pass of Megatron's plain local layer over what that
layer launches.  Transformer Engine's layers launch less and run more Python for it (their layouts,
quantizers, workspaces, the choice of an attention kernel), and a rank's experts have work for each
one.  Both are properties of the software, not of a host: measured with tiny layers on a CPU by

    python tools/bench host-work

for torch 2.15, megatron-core 0.19.2 and transformer-engine 2.20.2.  Its kernels are left out there:
`launches` counts each as one operator.  `benchmarks/results/host-work.json` has what was measured.
"""

from __future__ import annotations

from typing import NamedTuple


class HostWork(NamedTuple):
    """Operators' worth of the forward and of the backward pass."""

    forward: float
    backward: float


NORM_LINEAR = HostWork(3.8, 4.1)
"""`LayerNormLinear`: a norm with the product behind the norm."""
LINEAR = HostWork(3.2, 4.1)
"""`Linear`."""
NORM = HostWork(4.8, 4.0)
"""A norm by itself: of queries, of keys, or before a router."""
ATTENTION = HostWork(11.2, 2.5)
"""`DotProductAttention`, which looks for its kernel in each pass."""
GROUPED_LINEAR = HostWork(5.6, 4.5)
"""`GroupedLinear` without any expert."""
GROUPED_EXPERT = HostWork(0.13, 0.58)
"""Each expert of a `GroupedLinear`: lists of weights, outputs and gradients."""
SINGLE_EXPERT = HostWork(2.2, 4.4)
"""Each expert of a `SequentialMLP` of Transformer Engine's layers, beyond its products and its
activation; one of local layers has nothing beyond them."""
ROUTING = HostWork(17.5, 8.5)
"""Router and dispatcher, with their launches: what a layer of grouped experts takes beside its
attention, norms, products, activation and sums."""
HOOK = 0.2
"""Hook of a parameter in data parallelism (`_make_backward_post_hook`), in the backward pass."""
ADDED_GRADIENT = 0.2
"""Operator by which the hook adds a gradient that no product has accumulated; no Python stands
before this operator, so it is the least that an operator takes."""
