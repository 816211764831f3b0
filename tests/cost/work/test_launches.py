"""Operators that the host launches, and the floor that they are to a pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.bounds.step_time import step_time_bound
from megatron_hetero.cluster.catalogue import gpu_type, usual_launch_s
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.share import even_share, member_shares
from megatron_hetero.cost.work import host_work
from megatron_hetero.cost.work.launches import (
    Launches,
    head_launches,
    hook_launches,
    layer_launches,
)
from megatron_hetero.cost.work.pieces import PieceTimes, price_pieces
from megatron_hetero.cost.work.speed import speed_of
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import TrainingSpec
from tests.cost.builders import FAST, INSIDE, estimate_plan, make_cluster, make_workload, place

WORKLOAD = make_workload(hidden_size=512, num_layers=4)
TRAINING: TrainingSpec = WORKLOAD.training
RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "host-work.json"
HOST_S = 1e-3
"""Longer for each operator than any operator of the job runs."""
LLAMA = {"gated_mlp": True, "add_bias_linear": False}
PLAIN = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
SLOW_HOST = replace(FAST, launch_s=HOST_S)


def pieces(width: int = 1, gpu: GpuType = SLOW_HOST, **changes: object) -> PieceTimes:
    workload = replace(WORKLOAD, training=replace(WORKLOAD.training, **changes))
    members = [(gpu, share) for share in member_shares(workload.model, width)]
    return price_pieces(workload, None, members, INSIDE, 1024)


def launches(workload: Workload = WORKLOAD, width: int = 1, **changes: object) -> Launches:
    training = replace(workload.training, **changes)
    share = even_share(workload.model, width)
    return layer_launches(workload.model, training, share, flash=True)


def test_no_pass_is_shorter_than_its_launches() -> None:
    found = pieces()
    hooks = hook_launches(WORKLOAD.model, TRAINING, even_share(WORKLOAD.model, 1))
    assert found.layer.forward_s == pytest.approx(HOST_S * launches().forward)
    assert found.layer.backward_s == pytest.approx(HOST_S * (launches().backward + hooks))
    assert found.head.forward_s == pytest.approx(HOST_S * head_launches(TRAINING, 1).forward)
    # A host that is quick enough changes nothing.
    assert pieces(gpu=replace(FAST, launch_s=1e-9)) == pieces(gpu=FAST)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_narrower_shard_and_fewer_tokens_need_as_many(width: int) -> None:
    alone, group = launches(), launches(width=width)
    assert group == alone.plus(2, 2)  # its all-reduces
    assert launches(width=width, sequence_parallel=True) == alone.plus(4, 6)
    assert pieces(width).layer.forward_s > pieces(1).layer.forward_s
    assert pieces(micro_batch_size=2).layer == pieces(micro_batch_size=1).layer


def test_recomputation_launches_again() -> None:
    plain = launches()
    assert launches(recompute="full") == plain.plus(0, plain.forward)
    core = host_work.ATTENTION.forward  # fused
    assert launches(recompute="selective") == plain.plus(0, core)
    again_s = pieces(recompute="full").layer.backward_s - pieces().layer.backward_s
    assert again_s == pytest.approx(HOST_S * plain.forward)


def test_a_layer_of_transformer_engine_is_worth_what_was_measured() -> None:
    """The parts of `host-work` sum to its whole layer, which was measured by itself."""
    rows = json.loads(RESULT.read_text())["tables"]["parts"]["rows"]
    measured = {part: (float(f), float(b), int(kernels)) for part, f, b, kernels in rows}
    own = launches(replace(WORKLOAD, model=replace(WORKLOAD.model, **LLAMA)), **PLAIN)
    forward, backward, kernels = measured["layer"]
    assert sum(own) == pytest.approx(forward + backward + kernels * host_work.KERNEL, rel=0.1)
    # And each constant is the table's, with its kernels.
    for part, constant in (
        ("norm and linear", host_work.NORM_LINEAR),
        ("linear", host_work.LINEAR),
        ("norm", host_work.NORM),
        ("attention", host_work.ATTENTION),
    ):
        forward, backward, kernels = measured[part]
        assert sum(constant) == pytest.approx(forward + backward + kernels * host_work.KERNEL)
    for number in (4, 32):
        of_module = sum(host_work.GROUPED_LINEAR) + number * sum(host_work.GROUPED_EXPERT)
        forward, backward, _ = measured[f"grouped linear, {number}"]
        kernels = 3 * number * host_work.KERNEL
        assert of_module == pytest.approx(forward + backward + kernels, rel=0.05)


def test_gradients_that_are_added_apart_cost_an_operator_and_their_bytes() -> None:
    share = even_share(WORKLOAD.model, 1)
    apart = replace(TRAINING, unfused_gradients=True)
    more = hook_launches(WORKLOAD.model, apart, share) - hook_launches(
        WORKLOAD.model, TRAINING, share
    )
    assert more == pytest.approx(4 * host_work.KERNEL)
    # Each of 12 h^2 gradients is read once more, in the job's own elements.
    quick = replace(FAST, launch_s=0.0)
    times = [pieces(gpu=quick, unfused_gradients=given).layer.total_s for given in (True, False)]
    assert times[0] - times[1] == pytest.approx(
        12 * 512**2 * TRAINING.element_bytes / speed_of(TRAINING, quick).memory_bytes_per_s
    )


def test_the_slowest_host_of_a_group_counts() -> None:
    members = list(zip([FAST, SLOW_HOST], member_shares(WORKLOAD.model, 2), strict=True))
    mixed = price_pieces(WORKLOAD, None, members, INSIDE, 1024)
    assert mixed.layer == pieces(2).layer


@pytest.mark.parametrize("launch_s", [0.0, 1e-5, 1e-4, 1e-3])
def test_the_bound_stays_below_every_plan(launch_s: float) -> None:
    cluster = make_cluster(("a", replace(FAST, launch_s=launch_s), 4))
    costs = CostModel(cluster, WORKLOAD)
    bound = step_time_bound(costs).step_time_s
    for layout in ("tp4:4 @4", "tp2:2,tp2:2 @4", "tp1:4 @2 | tp1:4 @2", "tp1:1,tp1:1,tp2:2 @4"):
        step_s = estimate_plan(place(layout, WORKLOAD, cluster), cluster).step_time_s
        assert bound <= step_s * (1 + 1e-9)


def test_the_catalogue_has_it_and_a_cluster_file_corrects_it(tmp_path: Path) -> None:
    assert gpu_type("A100-80GB").launch_s == usual_launch_s() > 0
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "version: 1\n"
        "gpu_types: {A100-80GB: {launch_time: 20 us}, Own: {memory: 24 GiB, bf16: 100 TFLOPS,"
        " memory_bandwidth: 1 TB/s, library: NCCL}, H100-80GB: {launch_time: 0 us}}\n"
        "nodes:\n"
        "- {name: a, gpu: A100-80GB, count: 1}\n- {name: b, gpu: Own, count: 1}\n"
        "- {name: c, gpu: H100-80GB, count: 1}\n"
        "links: {between_nodes: {bandwidth: 25 Gb/s, latency: 10 us}}\n"
    )
    gpus = {node.name: node.gpu_type for node in load_cluster(path).nodes}
    found = {name: gpu.launch_s for name, gpu in gpus.items()}
    assert found == {"a": pytest.approx(20e-6), "b": usual_launch_s(), "c": 0.0}
    own = {name for name, gpu in gpus.items() if gpu.has_own_launch_time}
    assert own == {"a", "c"}, "no measurement replaces theirs"


_COUNT_WITH_MEGATRON = """
import contextlib, json, sys
import torch
import megatron_hetero.runtime  # first: hides a Transformer Engine that cannot be used
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch.utils._python_dispatch import TorchDispatchMode

torch.cuda.current_device = lambda: "cpu"
CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
store = torch.distributed.FileStore(sys.argv[1], 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel()
VIEWS = (
    "view", "transpose", ".t.", "detach", "permute", "squeeze", "slice", "alias", "as_strided",
    "split", "empty", "ones_like",
)

class Counter(TorchDispatchMode):
    number = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += not any(word in str(function) for word in VIEWS)
        return function(*args, **(kwargs or {}))

found = {}
for name in ("float32", "bfloat16"):
    dtype = getattr(torch, name)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype,
        bf16=name == "bfloat16", bias_dropout_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    )
    layer = build_module(get_gpt_layer_local_spec(), config=config).to(dtype)
    x_SBH = torch.randn(16, 1, 64, dtype=dtype, requires_grad=True)
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    with Counter() as forward:
        y_SBH = layer(hidden_states=x_SBH, attention_mask=mask)[0]
    with Counter() as backward:
        y_SBH.backward(torch.ones_like(y_SBH))
    found[name] = forward.number, backward.number
print("counts", json.dumps(found))
"""


@pytest.mark.slow
def test_a_local_layer_launches_what_megatrons_does(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _COUNT_WITH_MEGATRON, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout.split("counts ")[-1])
    training = replace(TRAINING, attention_dropout=0.0, hidden_dropout=0.0)
    share = even_share(WORKLOAD.model, 1)
    for precision, name in (("fp32", "float32"), ("bf16", "bfloat16")):
        own = layer_launches(
            WORKLOAD.model,
            replace(training, precision=precision),
            share,
            flash=False,
            fused=False,
        )
        assert list(own) == counts[name]
