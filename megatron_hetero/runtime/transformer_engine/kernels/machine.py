"""Answers about the machine; of libraries those of the versions that Transformer Engine needs."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def get_cublasLt_version() -> int:  # noqa: N802
    """Return a version of cuBLASLt with all that is asked for by version."""
    return 130100


def get_cudnn_version() -> int:
    """Return cuDNN's version 9.19: packed log-sums, no limits of sizes."""
    return 91900


def get_num_cublas_streams() -> int:
    """Return the number of workspaces of grouped products."""
    return 1


def get_stream_priority_range() -> tuple[int, int]:
    """Return the priorities of streams, of which a CPU has none."""
    return (0, 0)


def device_supports_multicast(*given: Any) -> bool:
    """Tell that the device has no multicast."""
    return False


def ubuf_built_with_mpi() -> bool:
    """Tell that exchanges under products do not come through MPI."""
    return False


def ep_zero_copy_supported() -> bool:
    """Tell that NCCL's exchange of experts is not there."""
    return False


def swap_first_dims(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a tensor with its first two dimensions exchanged, contiguous, in `out` if given."""
    swapped = tensor.transpose(0, 1)
    if out is None:
        return swapped.contiguous()
    out.copy_(swapped)
    return out
