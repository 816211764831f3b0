"""What Megatron's own GPTModel multiplies and moves: operators as a GPU runs them, on a CPU.

A kernel of Transformer Engine is one operator, and so is a function that Megatron compiles
(`jit_fuser`, which is `torch.compile`); of all else, each operation of torch.  Counted are the
FLOPs of products, the bytes that all others read and write, and how many these are.

    python -m tests.cost.work.megatron_traffic layer|model JSON

prints for each of a list of Megatron's flags [FLOPs, bytes, operators] of either pass.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS = 64
BASE = (
    "--train-iters=1 --lr=1e-3 --mock-data --tokenizer-type=NullTokenizer --bf16 --eval-iters=1 "
    "--eval-interval=10 --distributed-backend=gloo --use-cpu-initialization --vocab-size=256 "
    "--no-persist-layer-norm --micro-batch-size=2 --global-batch-size=2 --num-attention-heads=8 "
    f"--hidden-size=512 --seq-length={TOKENS} --max-position-embeddings={TOKENS}"
)
_MOVES_NOTHING = frozenset(
    {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
    | {"_unsafe_view", "_local_scalar_dense", "lift_fresh", "_reshape_alias", "set_"}
)
_WRITES = frozenset(
    {"fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "new_zeros", "arange"}
)
_INDEXED = frozenset({"index_select", "gather", "embedding"})


class Counter:
    """FLOPs of products, bytes of all else and how many move them; nothing while a kernel's
    stand-in works."""

    def __init__(self) -> None:
        self.flops = self.moved = 0.0
        self.kernels = 0
        self.is_inside = False

    def move(self, *tensors: Any) -> None:
        """Count an operator, with the tensors that it reads or writes."""
        self.kernels += 1
        self.moved += sum(_touched(each) for each in _tensors(tensors))

    def inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of which nothing counts."""
        self.is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self.is_inside = False


_count = Counter()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _touched(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; what is repeated by a stride of 0 is read once."""
    number = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride else 1
    return number


class _Operations(TorchDispatchMode):
    """Counts operations of torch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split("::")[-1].split(".")[0]
        if _count.is_inside or func.is_view or name in _MOVES_NOTHING:
            return result
        given, made = list(_tensors(args)), list(_tensors(result))
        if name in ("mm", "bmm"):
            _count.flops += 2.0 * given[0].numel() * given[1].shape[-1]
        elif name in _WRITES:
            _count.move(made)
        elif name == "copy_":
            _count.move(given[1], made)
        elif name in _INDEXED:
            _count.move(made, made)
        elif name in ("scatter_add_", "index_add", "index_add_"):
            # Each row of the source is read, and what it is added to is read and written.
            source = args[3]
            _count.move(source, source, source)
        else:
            _count.move(given, made)
        return result


def _kernel(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Count a kernel of Transformer Engine as one operator."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _count.is_inside:
            return function(*args, **kwargs)
        result = _count.inside(function, *args, **kwargs)
        if name == "te_general_grouped_gemm":
            for a, b in zip(args[0], args[2], strict=True):
                _multiply(a, b, args[1])
        elif name == "generic_gemm":
            _multiply(args[0], args[2], args[1])
        elif name == "wgrad_gemm_accum_fp32":
            _multiply(args[0], args[1], False)
        elif name.startswith("fused_rope"):
            # The angles are few, and the same for all heads.
            _count.move(args[0], result)
        elif not name.startswith("fused_attn"):
            _count.move(args, result)
        return result

    return call


def _multiply(a: torch.Tensor, b: torch.Tensor, transposed: bool) -> None:
    """Count a product with a matrix of `a.shape[-1]` outputs, or inputs if transposed."""
    if a.numel():
        depth = a.numel() // (a.shape[0] if transposed else a.shape[-1])
        _count.flops += 2.0 * a.numel() * (b.numel() // depth)


def _rotated(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _kernels(make: Callable[[str], types.ModuleType], name: str) -> types.ModuleType:
    """Make a module of kernels that count."""
    module: Any = make(name)
    module.fused_rope_forward = module.fused_rope_backward = _rotated
    for key, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType) and not key.startswith("get_"):
            setattr(module, key, _kernel(value, key))
    return module


def _compiled(function: Any = None, **options: Any) -> Any:
    """Count a compiled function as one operator of either pass."""
    if function is None:
        return functools.partial(_compiled, **options)

    @functools.wraps(function)
    def call(*args: Any, **settings: Any) -> Any:
        if _count.is_inside:
            return function(*args, **settings)
        given = list(_tensors(args))
        if torch.is_grad_enabled() and any(each.requires_grad for each in given):
            return _Fused.apply(function, args, *given)
        result = _count.inside(function, *args, **settings)
        _count.move(given, result)
        return result

    return call


class _Fused(torch.autograd.Function):
    """A compiled function with its gradients."""

    @staticmethod
    def forward(ctx: Any, function: Any, args: Any, *given: torch.Tensor) -> Any:
        ctx.function, ctx.args = function, args
        result = _count.inside(function, *args)
        _count.move(given, result)
        if function.__name__ == "bias_dropout_add_fused_train" and args[2]:
            _count.moved += args[0][0].numel()  # a byte of the mask each
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        given = list(_tensors(ctx.args))
        if ctx.function.__name__ == "bias_dropout_add_fused_train":
            (x, bias), _, dropout = ctx.args
            # Without dropout both gradients are the one that comes.
            if dropout:
                _count.move(gradient, x)
                _count.moved += x.numel()
            if bias is not None:
                _count.move(gradient)
            of_bias = [] if bias is None else [torch.zeros_like(bias)]
            return None, None, gradient, *of_bias, gradient
        made = tuple(torch.empty_like(each) for each in given)
        _count.move(gradient, given, made)
        return None, None, *made


class _Triton:
    """A kernel of Triton: rotation of latent attention's queries in place, or keys and values."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._call

    def _call(self, *args: Any) -> None:
        if "_q_" in self.name:
            rotary = _count.inside(lambda: args[0][..., : args[4]])
            _count.move(rotary, rotary)
        else:
            _count.move(args[:4])


def layer_traffic(flags: str) -> list[list[float]]:
    """Measure a layer: what a model of two has beyond a model of one."""
    one, two = (model_traffic(f"{BASE} {flags} --num-layers={n}") for n in (1, 2))
    return [[b - a for a, b in zip(*each, strict=True)] for each in zip(one, two, strict=True)]


def start() -> None:
    """Start Megatron in this process, as one rank, with kernels that count."""
    from megatron_hetero.runtime import backend
    from megatron_hetero.runtime.transformer_engine import finder, layers

    torch.compile = _compiled  # type: ignore[assignment]
    finder._MADE = {name: functools.partial(_kernels, make) for name, make in finder._MADE.items()}
    if (reason := layers.provide()) is not None:
        sys.exit(f"no Transformer Engine on this CPU: {reason}")
    backend.activate_cpu_backend()
    # Megatron looks for Transformer Engine when it is imported.
    from megatron.core import parallel_state
    from megatron.core.fusions import fused_mla_yarn_rope_apply as of_latents
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    os.environ.update(WORLD_SIZE="1", RANK="0")
    store = torch.distributed.FileStore(f"{tempfile.mkdtemp()}/store", 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    for name in [name for name in vars(of_latents) if name.startswith("rotary_")]:
        setattr(of_latents, name, _Triton(name))


def model_traffic(flags: str) -> list[list[float]]:
    """Measure a whole model in Megatron's own data parallelism."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import arguments
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    sys.argv = ["pretrain.py", *flags.split()]
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    args.padded_vocab_size = None
    config = gpt_config_from_args(args)
    config.vocab_size, config.should_pad_vocab = args.vocab_size, True
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model: Any = GPTModelBuilder(config).build_model(groups, True, True).bfloat16()
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(config.transformer, ddp, model)
    tokens = torch.randint(0, args.vocab_size, (args.micro_batch_size, args.seq_length))
    positions = torch.arange(args.seq_length)[None].expand_as(tokens)
    model(tokens, positions, None, labels=tokens)  # tables of angles are made once
    found = []
    with _Operations():
        _counted()
        loss = model(tokens, positions, None, labels=tokens)
        found.append(_counted())
        total = _count.inside(lambda: loss.float().sum())
        total.backward()
        found.append(_counted())
    return found


def _counted() -> list[float]:
    """Return what was counted, and begin anew."""
    found = [_count.flops, _count.moved, _count.kernels]
    _count.flops, _count.moved, _count.kernels = 0.0, 0.0, 0
    return found


def main(piece: str, cases: Sequence[str]) -> None:
    """Be the process that has Transformer Engine's layers."""
    start()
    measure = layer_traffic if piece == "layer" else model_traffic
    print(json.dumps([measure(flags) for flags in cases]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
