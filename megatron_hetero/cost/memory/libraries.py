"""Bytes of a GPU for CUDA and its libraries, and the margin left free by plans.

None of this is Megatron's.  PyTorch's allocator counts its own workspaces of matrix products alone;
`nvidia-smi` counts all of it.
"""

from __future__ import annotations

from megatron_hetero.cluster.nodes import GpuType, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import NOT_MEASURED, Profile
from megatron_hetero.hashed import value
from megatron_hetero.plan.communication.communicators import CHANNELS_OF_MESSAGES
from megatron_hetero.plan.communication.under_way import num_communicators

CONTEXT_BYTES = 666_632_192
"""Bytes of a process with all of PyTorch's kernels loaded (measured in pytorch/pytorch#86509; 426
MiB before the first kernel in unslothai/unsloth-zoo#1053)."""

CONNECTION_BYTES = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + (4 << 20)
"""Receive buffers of a connection on one channel, for NCCL's protocols LL, LL128 and Simple: 0.5,
4.7 and 4 MiB (`computeBuffSizes` in src/init.cc and `p2pRecvSetup` in src/transport/p2p.cc of
NVIDIA/nccl; `NCCL_BUFFSIZE` in its user guide)."""

_NVLINK_BYTES_PER_S = 25e9
"""One direction of an NVLink (second generation on)."""
_MOST_CHANNELS = 24
"""NCCL's on eight A100 or H100 behind NVSwitch."""
_TORCH_WORKSPACE_BYTES, _TORCH_HOPPER_WORKSPACE_BYTES = 2 * (4 << 20) + 8 * (16 << 10), 32 << 20
"""Bytes of one workspace for cuBLAS and cuBLASLt, before Hopper and from Hopper on: `:4096:2:16:8`
and 32 MiB (`parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp of
pytorch/pytorch)."""
_NUM_TORCH_WORKSPACES = 2
"""Threads that compute products: the one of forward passes, and autograd's for backward passes.
PyTorch has a workspace for each handle and stream, and each thread has a handle of its own."""
_TE_WORKSPACE_BYTES, _TE_HOPPER_WORKSPACE_BYTES = 4 << 20, (32 << 20) + 1024
"""Bytes of Transformer Engine's one workspace (`get_cublas_workspace_size_bytes` in its
pytorch/cpp_extensions/gemm.py)."""

REMAINDER_BYTES, LEAST_MARGIN_BYTES = 1_000_000_000, 1_500_000_000
"""Bytes left free beside the largest tensor that passes release, and least bytes left free: for
fragments of PyTorch's allocator and for all without a term.

Whole runs, replayed under the allocator's rules on cards of 75 GB (`tools/replay_allocator.py`),
need no more than this beyond their peak: a hole as large as such a tensor is lost when something
small lives on in it, and all other holes took 0.9 GB at most.
"""


@value(frozen=True)
class KeptFree:
    """Bytes of a GPU that hold none of Megatron's tensors.

    Attributes:
        libraries: CUDA's context, buffers of communicators, workspaces.
        reserve: what the cluster's limits leave beside them; None is a margin (`margin_bytes`).
    """

    libraries: int
    reserve: int | None

    def reserve_beside(self, largest_bytes: int) -> int:
        """Return what a plan leaves where the largest tensor that passes release has so many
        bytes."""
        return margin_bytes(largest_bytes) if self.reserve is None else self.reserve


def kept_free(
    cluster: Cluster, node: Node, width: int, num_inward: int, profile: Profile | None = None
) -> KeptFree:
    """Return what a GPU of a stage keeps free of tensors: `limits.memory_reserve`, or what its
    libraries take and a margin.

    Args:
        cluster: a reserve given in its limits covers libraries and margin; of a single GPU no
            communicator has another member.
        node: the GPU's node.
        width: GPUs of its tensor-parallel group.
        num_inward: communicators by which messages come to it (`inward_communicators`).
        profile: may have measured the context and a communicator.
    """
    # A reserve that the user gives stands for all that is not Megatron's.
    given = cluster.limits.memory_reserve_bytes
    if given is not None:
        return KeptFree(0, given)
    gpu = node.gpu_type
    measured = NOT_MEASURED if profile is None else profile.gpus.get(gpu.name, NOT_MEASURED)
    # Measured figures come first; communicators only where another GPU is there to speak to.
    libraries = (measured.context_bytes or CONTEXT_BYTES) + workspace_bytes(gpu)
    if len(cluster.nodes) > 1 or node.num_gpus > 1:
        libraries += communicators_bytes(node, width, num_inward, measured.communicator_bytes)
    return KeptFree(libraries, None)


def memory_kind(node: Node) -> tuple[str, int, int]:
    """Return a key, equal for nodes with the same memory for a stage."""
    return node.gpu_type.name, node.gpu_type.memory_bytes, num_channels(node)


def margin_bytes(largest_bytes: int) -> int:
    """Return what a plan leaves of a card for a stage's fragments and for what has no term.

    Args:
        largest_bytes: of the largest tensor that the stage's passes release.
    """
    return max(REMAINDER_BYTES + largest_bytes, LEAST_MARGIN_BYTES)


def workspace_bytes(gpu: GpuType) -> int:
    """Return the workspaces of matrix products, Transformer Engine's included."""
    engine = _TE_HOPPER_WORKSPACE_BYTES if _is_hopper_or_later(gpu) else _TE_WORKSPACE_BYTES
    return torch_workspace_bytes(gpu) + engine


def torch_workspace_bytes(gpu: GpuType) -> int:
    """Return PyTorch's workspaces of matrix products, which its allocator counts as allocated."""
    size = _TORCH_HOPPER_WORKSPACE_BYTES if _is_hopper_or_later(gpu) else _TORCH_WORKSPACE_BYTES
    return _NUM_TORCH_WORKSPACES * size


def _is_hopper_or_later(gpu: GpuType) -> bool:
    return gpu.capability is not None and gpu.capability >= 9


def inward_communicators(first: bool, last: bool, num_in_flight: int) -> int:
    """Count the communicators by which messages come to a stage: those of activations, of which one
    more is in flight over the boundary before the stage, and those of gradients, as the runtime
    makes them (`plan.communication.under_way`).

    Args:
        first, last: whether the stage is the first, the last of its pipeline.
        num_in_flight: micro-batches that it holds at the peak.
    """
    of_activations = (not first) * num_communicators(num_in_flight + 1)
    return of_activations + (not last) * num_communicators(num_in_flight)


def communicators_bytes(
    node: Node, width: int, num_inward: int, of_two_bytes: int | None = None
) -> int:
    """Return the buffers of a rank's communicators: its tensor-parallel group, the one of the
    gradients, the whole job, and those of messages.

    The group of the gradients is counted whether or not the plan has several replicas.  A
    communicator makes its buffers at first use: those of a ring of two, and of a ring and a tree of
    more, receive on 2 and on 3 connections of each channel.  On four A100 with 24 channels that is
    441 and 662 MiB; NVIDIA/nccl#964 measured 544 and 688.  A communicator of messages has one
    connection to receive on, of a few channels (`runtime.parallel.connecting`).

    Args:
        node: the GPU's node.
        width, num_inward: as in `kept_free`.
        of_two_bytes: a measured communicator of two ranks, for what its connections should take.
    """
    if of_two_bytes is None:
        of_two_bytes = _num_connections(2) * CONNECTION_BYTES * num_channels(node)
    channels = num_channels(node)
    # The gradients' communicator and the whole job's, each as of three ranks or more.
    num_connections = 2 * _num_connections(3)
    if width > 1:
        num_connections += _num_connections(width)
    # Of one channel each: exact whatever was measured.
    buffers = num_connections * channels + num_inward * min(CHANNELS_OF_MESSAGES, channels)
    # Scaled from a communicator of two: its bytes over its connections and channels, rounded up.
    return -(-of_two_bytes * buffers // (_num_connections(2) * channels))


def num_channels(node: Node) -> int:
    """Return NCCL's channels between GPUs of a node: two for every NVLink's worth of bandwidth,
    two over a PCIe bus."""
    # Without neighbours on the node there is the network alone.
    if node.num_gpus == 1:
        return 2
    return min(_MOST_CHANNELS, 2 * max(1, int(node.link.bytes_per_s / _NVLINK_BYTES_PER_S)))


def _num_connections(num_ranks: int) -> int:
    return 2 if num_ranks == 2 else 3
