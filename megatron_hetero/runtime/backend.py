"""CPU as a first-class backend: substitutes for everything that Megatron assumes of CUDA.

`activate_cpu_backend()` lets Megatron's own training loop run on a machine without a GPU: `cuda`
devices become `cpu`, streams and synchronisation become no-ops, and the CUDA random state becomes
the CPU one. It refuses to be switched on where CUDA works, so it is never active on GPUs, and
importing this module changes nothing.

Nothing here touches numbers: tensors, kernels and collectives are torch's own CPU ones.  NCCL
gathers tensors of unlike sizes, which gloo refuses: they are padded to the longest for the way.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.runtime.megatron.guarded import standing_for

CPU = torch.device("cpu")

# Stands for the host's random state while torch's own stands for the device's.
_host_draws = torch.Generator()

# Flags without which Megatron reaches for fused CUDA kernels.  They change speed, not the model.
# A job with Transformer Engine leaves two of them out (`transformer_engine.layers.cpu_flags`).
CPU_FLAGS: tuple[str, ...] = (
    "--distributed-backend=gloo",
    "--transformer-impl=local",
    "--use-cpu-initialization",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
)

# Flags with which Megatron trains on a GPU without Transformer Engine and Apex.
PLAIN_GPU_FLAGS: tuple[str, ...] = (
    "--transformer-impl=local",
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
)


def cuda_is_usable() -> bool:
    """Tell if torch sees a CUDA device; False while this backend is active."""
    return _active is None and torch.cuda.is_available()


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Mode that replaces `cuda` by `cpu` in the device of every torch call."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron recognises float tensors by the names of their CUDA types.
            return func(args[0]).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.device and args and _is_cuda(args[0]):
            return CPU
        if func is torch.Tensor.random_ and kwargs.get("generator", _host_draws) is None:
            # A data loader seeds itself from the host's random state, on the ranks that read data.
            # Here dropout draws from that state, which a tensor-parallel group has to share.
            kwargs = {**kwargs, "generator": _host_draws}
        if func is torch.Tensor.to:
            # The one call that takes the device by position.
            args = tuple(CPU if _is_cuda(a) else a for a in args)
        return func(*args, **kwargs)


class _NullStream:
    """Substitute for a CUDA stream or event; on a CPU there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: Any = None) -> _NullStream:
        return self

    def query(self) -> bool:
        return True


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _seed_cpu(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _gathers_unlike(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.distributed.all_gather` for parts `[rows of a rank, ...]` of unlike lengths.

    Megatron's all-to-all dispatcher gathers so over the ranks that divide an expert: each comes
    with the tokens that the ranks of its own row sent.
    """

    def gathered(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        longest = max(tensor_list, key=len) if tensor.dim() else tensor
        # Equal parts need no filling; a call that does not wait could not cut the filling off.
        if async_op or all(part.shape == longest.shape for part in tensor_list):
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        # Zeros fill each part up to the longest, and are cut off on arrival.
        padded = torch.zeros_like(longest)
        padded[: len(tensor)] = tensor
        received = [torch.empty_like(longest) for _ in tensor_list]
        gather(received, padded, group=group)
        for part, own in zip(tensor_list, received, strict=True):
            part.copy_(own[: len(part)])
        return None

    return gathered


def _replacements(mode: TorchFunctionMode) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, attribute, value) of everything that the active backend replaces."""
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.utils import StragglerDetector
    from megatron.training import activation_logging, dgrad_logging

    cuda = torch.cuda
    yield cuda, "is_available", lambda: True
    yield cuda, "device_count", lambda: 1
    yield cuda, "current_device", lambda: CPU
    # These have nothing to do on a CPU.
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "set_stream",
        "reset_peak_memory_stats",
    ):
        yield cuda, name, _nothing
    # A CPU counts no device memory.
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        yield cuda, name, _zero
    # Every count of the allocator by its name: Megatron's log to TensorBoard reads some.
    yield cuda, "memory_stats", lambda *a, **k: defaultdict(int)
    yield cuda, "Stream", _NullStream
    yield cuda, "Event", _NullStream
    yield cuda, "current_stream", lambda *a, **k: _NullStream()
    yield cuda, "default_stream", lambda *a, **k: _NullStream()
    yield cuda, "is_current_stream_capturing", lambda: False
    yield cuda, "stream", lambda *a, **k: contextlib.nullcontext()
    # Megatron asks for the architecture to choose flags that only matter on GPUs.
    yield (
        cuda,
        "get_device_properties",
        lambda *a, **k: SimpleNamespace(major=8, minor=0, name="cpu", multi_processor_count=1),
    )
    yield cuda, "get_device_capability", lambda *a, **k: (8, 0)
    # Data loaders with workers pin memory in a thread of their own where there is an accelerator.
    yield torch.accelerator, "is_available", lambda: False
    yield cuda, "get_rng_state", _get_rng_state
    yield cuda, "set_rng_state", _set_rng_state
    yield cuda, "manual_seed", _seed_cpu
    yield cuda, "manual_seed_all", _seed_cpu
    # Ranges for NVIDIA's profiler need its library; there is no profiler here to read them.
    yield cuda.nvtx, "range_push", _nothing
    yield cuda.nvtx, "range_pop", _nothing
    # The tracker keeps one state for each name; both functions assume a CUDA generator.
    for name, function in (
        ("_get_cuda_rng_state", _get_rng_state),
        ("_set_cuda_rng_state", _set_rng_state),
    ):
        yield megatron_random, name, standing_for(getattr(megatron_random, name), function)
    # Without CUDA Megatron leaves it as it is made, which is off: there are no sensors to ask.
    yield StragglerDetector, "_configured", True
    # Without Transformer Engine stand-ins, which are no types, have the names of its layers.
    for module in (activation_logging, dgrad_logging):
        yield module, "LINEAR_TYPES", tuple(t for t in module.LINEAR_TYPES if isinstance(t, type))
    # Torch calls a backward pass through the mode, and takes the mode away meanwhile.
    yield torch.autograd, "_engine_run_backward", _within(mode, torch.autograd._engine_run_backward)
    yield dist, "all_gather", _gathers_unlike(dist.all_gather)
    # Asks the accelerator whether a graph is being captured, at every optimizer step.
    yield torch.optim.Optimizer, "_accelerator_graph_capture_health_check", _nothing


def _within(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return call


class _ActiveBackend:
    def __init__(self) -> None:
        self.saved: list[tuple[Any, str, Any]] = []
        self.mode = _CudaMeansCpu()


_active: _ActiveBackend | None = None


def activate_cpu_backend() -> None:
    """Run Megatron on the CPU from here on, in this process. A second call changes nothing.

    Raises:
        EnvironmentMismatchError: torch sees a CUDA device; training there needs no substitutes.
    """
    global _active
    if _active is not None:
        return
    if torch.cuda.is_available():
        raise EnvironmentMismatchError(
            "The CPU backend was asked for, but torch sees "
            f"{torch.cuda.device_count()} CUDA device(s). It never runs beside CUDA; set "
            'CUDA_VISIBLE_DEVICES="" to rehearse on this machine\'s CPU.'
        )
    # Megatron insists on it wherever it finds tensor parallelism; no device here reads it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Megatron compiles small functions (jit_fuser); the compiler would ask the GPU what it can do.
    torch.compiler.set_stance("force_eager")
    backend = _ActiveBackend()
    for owner, name, value in _replacements(backend.mode):
        backend.saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)
    backend.mode.__enter__()
    _active = backend


def deactivate_cpu_backend() -> None:
    """Restore everything that `activate_cpu_backend` replaced."""
    global _active
    if _active is None:
        return
    _active.mode.__exit__(None, None, None)
    for owner, name, value in reversed(_active.saved):
        setattr(owner, name, value)
    torch.compiler.set_stance("default")
    _active = None


@contextlib.contextmanager
def cpu_backend() -> Iterator[None]:
    """Activate the backend for the length of a `with` block."""
    activate_cpu_backend()
    try:
        yield
    finally:
        deactivate_cpu_backend()
