"""Host's work of the layers, in units of an operator: Python of Transformer Engine and of experts.

    python tools/bench host-work [--passes 60]

The unit is that of `launch_time`: a pass of Megatron's plain local layer over the operators that it
launches (`lab.probe.launching`).  Layers so small that their arithmetic is nothing run forward and
backward on a CPU in turns with that layer, and processor seconds are divided by the unit, so that
no figure is one of this host.  Kernels of Transformer Engine are stand-ins here, whose seconds are
left out: a kernel is one launch, which `cost.work.launches` counts.  What is printed is the work
beyond a pass of one operator of torch, which the autograd engine's own start is part of.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.transformer_engine import finder, layers
from tools.bench.show import Columns, option

OPTIONS = [option("--passes", type=int, default=60, help="of each layer")]
_HIDDEN, _HEADS, _TOKENS = 64, 4, 16
_WARM_UP = 5
_EXPERTS = (4, 8, 16, 32)
_TYPE = torch.bfloat16
_now = time.thread_time


class Work(NamedTuple):
    """Operators of a pass forward and backward, and kernels that were left out of them."""

    forward: float
    backward: float
    kernels: int


class _Kernels:
    """Seconds and calls of stand-ins for kernels."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._is_inside = 0.0, 0, False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts its seconds here."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # A kernel that calls another one is one kernel.
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside, start = True, _now()
            try:
                return function(*args, **kwargs)
            finally:
                self._is_inside = False
                self.seconds += _now() - start
                self.calls += 1

        return call

    def of_module(self, make: Callable[[str], types.ModuleType], name: str) -> types.ModuleType:
        """Make a module of kernels, all of which are timed."""
        module = make(name)
        for key, value in vars(module).items():
            if isinstance(value, types.FunctionType):
                setattr(module, key, self.timed(value))
        return module


_kernels = _Kernels()
Pass = Callable[[], tuple[float, float]]
"""Runs once forward and backward; seconds of both without those of kernels."""


def _pass(function: Callable[..., Any], *inputs: Any) -> Pass:
    def run() -> tuple[float, float]:
        _kernels.seconds, start = 0.0, _now()
        found = function(*inputs)
        forward_s = _now() - start - _kernels.seconds
        output = found[0] if isinstance(found, tuple) else found
        gradient = torch.ones_like(output)
        _kernels.seconds, start = 0.0, _now()
        output.backward(gradient)
        return forward_s, _now() - start - _kernels.seconds

    return run


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Leave out what only a CPU has: the mode that exchanges devices, and Python's collector."""
    active = backend._active
    assert active is not None
    gc.collect()
    gc.disable()
    active.mode.__exit__(None, None, None)
    try:
        yield
    finally:
        active.mode.__enter__()
        gc.enable()


def _work(unit: Pass, num_operators: float, run: Pass, passes: int) -> Work:
    """Measure a pass in operators: the lower quartiles of both, taken in turns."""
    units, forwards, backwards = [], [], []
    with _quietly():
        for index in range(_WARM_UP + passes):
            once = unit()
            _kernels.calls = 0
            forward_s, backward_s = run()
            if index >= _WARM_UP:
                units.append(sum(once) / num_operators)
                forwards.append(forward_s)
                backwards.append(backward_s)
    unit_s, forward_s, backward_s = (sorted(v)[passes // 4] for v in (units, forwards, backwards))
    return Work(forward_s / unit_s, backward_s / unit_s, _kernels.calls)


def _prepare() -> None:
    """Start Megatron with Transformer Engine in this process, every kernel of it timed."""
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    finder._MADE = {
        name: functools.partial(_kernels.of_module, make) for name, make in finder._MADE.items()
    }
    if why := layers.provide():
        raise UnsupportedError(f"no layers of Transformer Engine can be measured here: {why}")
    backend.activate_cpu_backend()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    store = torch.distributed.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def _config(**changes: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    # Llama's layer; nothing that would be compiled.
    given: dict[str, Any] = {
        "num_layers": 1, "hidden_size": _HIDDEN, "num_attention_heads": _HEADS,
        "use_cpu_initialization": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "params_dtype": _TYPE, "bf16": True, "bias_dropout_fusion": False,
        "bias_activation_fusion": False, "masked_softmax_fusion": False,
        "add_bias_linear": False, "gated_linear_unit": True, "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu,
    }  # fmt: skip
    fuses = changes.pop("gradient_accumulation_fusion", True)
    config = TransformerConfig(**given | changes)
    # Megatron's own check asks for Apex.
    config.gradient_accumulation_fusion = fuses
    return config


def _experts(number: int, **changes: Any) -> Any:
    return _config(
        num_moe_experts=number, moe_router_topk=2, moe_ffn_hidden_size=_HIDDEN,
        moe_token_dispatcher_type="alltoall", **changes,
    )  # fmt: skip


def _with_main_gradients(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    return module


def _layer(config: Any, spec: Any, *, is_wrapped: bool) -> torch.nn.Module:
    """Build a layer, in Megatron's data parallelism or without its hooks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.spec_utils import build_module

    layer = build_module(spec, config=config)
    if not is_wrapped:
        return _with_main_gradients(layer)
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer
    )


def _input(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=_TYPE, requires_grad=True)


def _modules() -> Iterator[tuple[str, Pass]]:
    """Yield Transformer Engine's modules as Megatron has them."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelGroupedLinear,
        TEDotProductAttention,
        TELayerNormColumnParallelLinear,
        TENorm,
        TERowParallelLinear,
    )
    from megatron.core.transformer.enums import AttnMaskType

    config = _config()
    sizes = {"config": config, "init_method": config.init_method, "bias": False}
    x = _input(_TOKENS, 1, _HIDDEN)
    norm_linear = TELayerNormColumnParallelLinear(
        _HIDDEN, _HIDDEN, gather_output=False, skip_bias_add=False, is_expert=False, **sizes
    )
    yield "norm and linear", _pass(_with_main_gradients(norm_linear), x)
    linear = TERowParallelLinear(
        _HIDDEN, _HIDDEN, input_is_parallel=True, skip_bias_add=False, is_expert=False, **sizes
    )
    yield "linear", _pass(_with_main_gradients(linear), x)
    yield "norm", _pass(_with_main_gradients(TENorm(config, _HIDDEN, 1e-5)), x)
    causal = AttnMaskType.causal
    attention = TEDotProductAttention(
        config=config, layer_number=1, attn_mask_type=causal, attention_type="self"
    )
    heads = [_input(_TOKENS, 1, _HEADS, _HIDDEN // _HEADS) for _ in range(3)]
    yield "attention", _pass(lambda *qkv: attention(*qkv, None, causal), *heads)
    for number in _EXPERTS:
        own = _experts(number, moe_grouped_gemm=True)
        grouped = TEColumnParallelGroupedLinear(
            number, _HIDDEN, _HIDDEN, config=own, init_method=own.init_method, bias=False,
            skip_bias_add=False, is_expert=True,
        )  # fmt: skip
        rows = _input(4 * number, _HIDDEN)
        yield (
            f"grouped linear, {number}",
            _pass(_with_main_gradients(grouped), rows, [4] * number),
        )


def _layers() -> Iterator[tuple[str, Pass]]:
    """Yield whole layers, dense and with experts."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    mask = torch.ones(1, 1, _TOKENS, _TOKENS, dtype=torch.bool).triu(1)
    x = _input(_TOKENS, 1, _HIDDEN)

    def run(layer: torch.nn.Module, own_mask: torch.Tensor | None = None) -> Pass:
        return _pass(lambda h: layer(hidden_states=h, attention_mask=own_mask), x)

    engine, local = get_gpt_layer_with_transformer_engine_spec, get_gpt_layer_local_spec
    plain = {"gradient_accumulation_fusion": False}
    of_local = {"normalization": "LayerNorm", **plain}
    yield "local layer", run(_layer(_config(**of_local), local(), is_wrapped=False), mask)
    yield "local layer, hooks", run(_layer(_config(**of_local), local(), is_wrapped=True), mask)
    yield "layer", run(_layer(_config(), engine(), is_wrapped=False))
    yield "layer, hooks", run(_layer(_config(), engine(), is_wrapped=True))
    yield "layer, hooks, unfused", run(_layer(_config(**plain), engine(), is_wrapped=True))
    for number in _EXPERTS:
        spec = engine(num_experts=number, moe_grouped_gemm=True)
        own = {"moe_grouped_gemm": True}
        yield f"grouped experts, {number}", run(
            _layer(_experts(number, **own), spec, is_wrapped=False)
        )
        yield f"grouped experts, hooks, {number}", run(
            _layer(_experts(number, **own), spec, is_wrapped=True)
        )
        yield f"grouped experts, hooks, unfused, {number}", run(
            _layer(_experts(number, **own, **plain), spec, is_wrapped=True)
        )
        spec = engine(num_experts=number, moe_grouped_gemm=False)
        yield f"single experts, {number}", run(_layer(_experts(number), spec, is_wrapped=False))
        spec = local(num_experts=number, moe_grouped_gemm=False)
        yield f"local experts, {number}", run(
            _layer(_experts(number, **of_local), spec, is_wrapped=False), mask
        )


def run(options: Any) -> Iterator[Columns | Sequence[str] | str]:
    """Measure every part, and yield its work."""
    _prepare()
    # Megatron looks for Transformer Engine when it is imported.
    from megatron_hetero.lab.probe import launching

    tiny = launching._tiny_layer()
    mask = torch.ones(1, 1, _TOKENS, _TOKENS, dtype=torch.bool).triu(1)
    x = torch.randn(_TOKENS, 1, _HIDDEN, requires_grad=True)
    unit = _pass(lambda h: tiny(hidden_states=h, attention_mask=mask), x)
    measure = functools.partial(
        _work, unit, launching._num_launches(), passes=options.passes
    )
    # Every backward pass starts the engine once, and every part has at least one operator.
    least = measure(run=_pass(lambda h: h + 1, _input(_TOKENS, 1, _HIDDEN)))
    packages = ("torch", "megatron-core", "transformer-engine")
    yield ", ".join(f"{name} {version(name)}" for name in packages)
    yield Columns.of(("part", "forward", "backward", "kernels"))
    for parts in (_modules, _layers):
        for name, part in parts():
            found = measure(run=part)
            net = found.forward - least.forward, found.backward - least.backward
            yield [name, *(f"{work:.1f}" for work in net), str(found.kernels)]
