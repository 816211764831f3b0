"""Work of the host beyond what it launches, in units of an operator: a table of Python's own time.

An operator is the unit of `launch_time`: a pass of Megatron's plain local layer over what that
layer launches.  Transformer Engine's layers launch less and run more Python for it (their layouts,
quantizers, workspaces, the choice of an attention kernel), and a rank's experts have work for each
one.  Both are properties of the software, not of a host: measured with tiny layers on a CPU by

    python tools/bench host-work

for torch 2.15, megatron-core 0.19.2 and transformer-engine 2.20.2.  Kernels are left out there and
put back here, `KERNEL` each.  `benchmarks/results/host-work.json` has what was measured.
"""

from __future__ import annotations

from typing import NamedTuple


class HostWork(NamedTuple):
    """Operators' worth of the forward and of the backward pass."""

    forward: float
    backward: float


KERNEL = 0.2
"""A kernel with no Python of its own before it: what the operator takes by which a hook adds a
gradient that no product has accumulated."""


def _with_kernels(
    forward: float, backward: float, forward_kernels: int, backward_kernels: int
) -> HostWork:
    return HostWork(forward + forward_kernels * KERNEL, backward + backward_kernels * KERNEL)


NORM_LINEAR = _with_kernels(3.8, 4.1, 2, 3)
"""`LayerNormLinear`: a norm with the product behind the norm."""
LINEAR = _with_kernels(3.2, 4.1, 1, 2)
"""`Linear`."""
NORM = _with_kernels(4.8, 4.0, 1, 1)
"""A norm by itself: of queries, of keys, or before a router."""
ATTENTION = _with_kernels(11.2, 2.5, 1, 1)
"""`DotProductAttention`, which looks for its kernel in each pass."""
GROUPED_LINEAR = HostWork(5.6, 4.5)
"""`GroupedLinear` without any expert."""
GROUPED_EXPERT = _with_kernels(0.13, 0.58, 1, 2)
"""Each expert of a `GroupedLinear`: lists of weights, outputs and gradients, and cuBLAS, which is
called for each (`multi_stream_cublas_gemm` of Transformer Engine)."""
SINGLE_EXPERT = _with_kernels(2.2, 4.4, 2, 4)
"""Both products of an expert of a `SequentialMLP` of Transformer Engine's layers."""
ROUTING = HostWork(17.5, 8.5)
"""Router and dispatcher, with their launches: what a layer of grouped experts takes beside its
attention, norms, products, activation and sums."""
HOOK = 0.2
"""Hook of a parameter in data parallelism (`_make_backward_post_hook`), in the backward pass."""
