"""Seconds of the host for each launched operator, as `launch_time` of a GPU type.

One operator of torch alone would say too little: most of the host's time is Megatron's Python.  So
a local layer of Megatron's runs forward and backward, so small that the device never holds the host
up, and the host's clock is divided by the operators that `cost.work.launches` counts in it.  On a
CPU, where host and device are one, that is what a tiny operator costs.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module

from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.launches import layer_launches
from megatron_hetero.model.load import load_workload
from megatron_hetero.runtime import backend

_HIDDEN, _HEADS, _TOKENS = 64, 4, 16
_WARM_UP, _REPEATS = 5, 50


def measured_launch_s() -> float:
    """Measure the median over passes of a tiny layer, in a tensor-parallel group of one."""
    device = torch.device("cuda" if backend.cuda_is_usable() else "cpu")
    layer = _tiny_layer().to(device)
    x_SBH = torch.randn(_TOKENS, 1, _HIDDEN, device=device, requires_grad=True)
    # True masks a place out: a token sees itself and the tokens before it.
    mask = torch.ones(1, 1, _TOKENS, _TOKENS, dtype=torch.bool, device=device).triu(1)
    gradient = torch.ones_like(x_SBH)
    times = []
    for _ in range(_WARM_UP + _REPEATS):
        # An empty queue, so that the host never waits for kernels of the pass before.
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        layer(hidden_states=x_SBH, attention_mask=mask)[0].backward(gradient)
        times.append(time.perf_counter() - start)
    return median(times[_WARM_UP:]) / _num_launches()


def _tiny_layer() -> Any:
    # Nothing is fused: `_num_launches` counts the operators of a plain layer.
    config = TransformerConfig(
        num_layers=1,
        hidden_size=_HIDDEN,
        num_attention_heads=_HEADS,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return build_module(get_gpt_layer_local_spec(), config=config)


def _num_launches() -> float:
    """Count the operators of both passes of the layer."""
    tiny = load_workload(
        None,
        (
            *("--num-layers=1", f"--hidden-size={_HIDDEN}", f"--num-attention-heads={_HEADS}"),
            *(f"--seq-length={_TOKENS}", f"--max-position-embeddings={_TOKENS}"),
            *("--vocab-size=64", "--micro-batch-size=1", "--global-batch-size=1"),
            *("--hidden-dropout=0", "--attention-dropout=0"),
        ),
    )
    share = even_share(tiny.model, 1)
    found = layer_launches(tiny.model, tiny.training, share, flash=False, fused=False)
    return found.forward + found.backward
