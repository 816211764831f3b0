"""Refusals of jobs that must not start: by name, with an exit code, before any process group
exists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.training.training import destroy_global_state

from megatron_hetero.errors import (
    EnvironmentMismatchError,
    HeteroError,
    MegatronVersionError,
    PlanFormatError,
    UnsupportedError,
    UsageError,
)
from megatron_hetero.flags.emit import megatron_args
from megatron_hetero.model.arguments import JobText, command_line_words, group_arguments
from megatron_hetero.model.megatron_flags import workload_from_arguments
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.batches import with_micro_batch_sizes
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.checks import machine, support
from megatron_hetero.runtime.megatron import straggler_port
from megatron_hetero.runtime.megatron.guarded import fingerprint
from megatron_hetero.runtime.megatron.replace import Replacement
from tests.runtime.workloads import plan, workload

LAYOUT = "tp2:3,tp1:1 @4 | tp1:4 @2"
MODEL = [
    "--num-layers=4",
    "--hidden-size=32",
    "--num-attention-heads=4",
    "--seq-length=16",
    "--max-position-embeddings=16",
    "--micro-batch-size=1",
    "--global-batch-size=6",
    "--lr=1e-3",
    "--train-iters=1",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--vocab-size=100",
    "--eval-interval=1000",
]


@pytest.fixture(autouse=True)
def _world_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")


def refuse(argv: list[str], error: type[HeteroError]) -> str:
    try:
        with pytest.raises(error) as caught:
            entry.main(argv)
    finally:
        backend.deactivate_cpu_backend()
        straggler_port.REPLACEMENT.revert()  # which comes before all refusals
        destroy_global_state()
    assert not dist.is_initialized()
    return str(caught.value)


def test_a_world_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    message = refuse([*MODEL, f"--hetero-layout={LAYOUT}"], EnvironmentMismatchError)
    assert "the plan has 4 devices" in message and "the job has 8" in message


def test_biases_of_experts_that_ranks_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and where the plan becomes flags."""
    asked = parse_layout("tp2ep2etp2:2,tp1:2 @3 | tp2ep2etp2:2,tp1:2 @3")
    flags = [*MODEL, "--num-experts=4", "--sequence-parallel"]
    monkeypatch.setenv("WORLD_SIZE", str(asked.num_devices))
    words = group_arguments(command_line_words(flags))
    with pytest.raises(UnsupportedError, match="--disable-bias-linear") as found:
        megatron_args(plan_from_layout(asked, workload_from_arguments(JobText("a test", words))))
    assert "divides each expert among 2 ranks" in str(found.value)


def test_a_width_that_does_not_divide_the_heads() -> None:
    message = refuse([*MODEL, "--hetero-layout=tp3:4 @5 | tp1:4 @1"], PlanFormatError)
    assert "3" in message and "heads" in message and "4" in message


def test_a_layout_of_another_depth_than_the_model() -> None:
    message = refuse([*MODEL, "--hetero-layout=tp2:3,tp1:2 @4 | tp1:5 @2"], UsageError)
    assert "--num-layers" in message


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--sft", "--window-size=4,0"], "with --window-size and --transformer-impl local"),
        (["--phase-transition-iterations=2"], "--train-samples in place of --train-iters"),
        (["--init-method-xavier-uniform"], "--init-method-xavier-uniform: leave it out"),
        (["--rerun-mode=report_stats"], "--rerun-mode report_stats: use validate_results"),
        (["--rampup-batch-size", "2", "2", "64"], "use --step-batch-size-schedule"),
        (["--async-save", "--use-persistent-ckpt-worker"], "--async-save without a GPU"),
        (["--eval-micro-batch-size=3"], "--eval-micro-batch-size 3: replica 0"),
        (["--eval-global-batch-size=7"], "--eval-global-batch-size: a batch of 7 leaves"),
        (
            ["--use-distributed-optimizer", "--dump-param-to-param-group-map=map"],
            "--dump-param-to-param-group-map with --use-distributed-optimizer: leave it out",
        ),
        (["--config-logger-dir=configs"], "--config-logger-dir: leave it out"),
        (["--gpu-sniff-test-interval=1"], "--gpu-sniff-test-interval: leave it out"),
        (
            ["--dist-ckpt-strictness=raise_all"],
            "--dist-ckpt-strictness: leave it out, or use log_unexpected or log_all",
        ),
        (
            ["--recompute-activations", "--recompute-modules=mlp"],
            "--recompute-modules mlp with biases: add --disable-bias-linear",
        ),
        (["--no-initialization"], "--no-initialization without a checkpoint in --load: leave it"),
        (
            ["--no-initialization", "--load=nothing", "--dist-ckpt-strictness=log_all"],
            "--no-initialization with --dist-ckpt-strictness: leave one of them out",
        ),
        (
            ["--num-experts=4", "--sequence-parallel", "--moe-input-jitter-eps=0.1"],
            "--moe-input-jitter-eps: leave it out; each rank would draw noise",
        ),
        (
            ["--num-experts=4", "--sequence-parallel", "--moe-router-force-load-balancing"],
            "--moe-router-force-biased: leave them out; they route at random",
        ),
    ],
)
def test_flags_that_a_plan_cannot_honour_yet(flags: list[str], name: str) -> None:
    message = refuse([*MODEL, f"--hetero-layout={LAYOUT}", *flags], UnsupportedError)
    assert name in message


def test_a_bias_that_leaves_a_recomputed_block_is_no_leaf_any_more() -> None:
    """Why `--recompute-modules mlp` is refused with biases: Megatron's own checkpoint ties the
    parameter to the pass that it belongs to, and going back through it leads there again."""
    from megatron.core.tensor_parallel.random import checkpoint

    bias, hidden = torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    backend.activate_cpu_backend()
    try:
        _, given = checkpoint(lambda x: (2 * x, bias), False, hidden)
    finally:
        backend.deactivate_cpu_backend()
    assert given is bias
    assert not bias.is_leaf


def test_a_micro_batch_size_that_does_not_divide_the_batch() -> None:
    asked = with_micro_batch_sizes(plan("tp1:4 @2x2 | tp1:4 @3"), 1)
    with pytest.raises(UnsupportedError, match=r"replica 0: micro-batches of 2 .* batch of 7"):
        support.check_plan(asked)


def test_a_plan_for_another_model(tmp_path: Path) -> None:
    asked = replace(plan(LAYOUT), workload=workload())
    path = tmp_path / "plan.json"
    save_plan(asked, path)
    message = refuse([*MODEL, f"--hetero-plan={path}"], UsageError)
    assert "hidden_size: plan 96, flags 32" in message


def test_a_plan_for_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_hetero.plan.ranks import rank_table

    asked = _on_hosts(plan("tp2:4 @1"))
    monkeypatch.setattr(backend, "cuda_is_usable", lambda: True)
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr(machine.socket, "getfqdn", lambda: "elsewhere")
    with pytest.raises(EnvironmentMismatchError, match=r"rank 1 .*node-a:1 on host a\.example"):
        machine.check_binding(asked, 1, rank_table(asked)[1])


def test_a_plan_for_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_hetero.plan.ranks import rank_table

    asked = _on_hosts(plan("tp2:4 @1"))
    monkeypatch.setattr(backend, "cuda_is_usable", lambda: True)
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "a.example")
    monkeypatch.setattr(machine.torch.cuda, "get_device_name", lambda index: "NVIDIA A10")
    with pytest.raises(
        EnvironmentMismatchError, match="has a 'NVIDIA A10', the plan wants RTX-4090"
    ):
        machine.check_binding(asked, 0, rank_table(asked)[0])
    monkeypatch.setattr(
        machine.torch.cuda, "get_device_name", lambda index: "NVIDIA GeForce RTX 4090"
    )
    machine.check_binding(asked, 0, rank_table(asked)[0])


def test_the_binding_is_printed() -> None:
    lines = list(machine.binding_lines(_on_hosts(plan("tp2:4 @1"))))
    assert lines == [
        "> megatron-hetero: tp2:4 @1",
        ">   rank 0 on node-a:0: replica 0, stage 0, tensor rank 0",
        ">   rank 1 on node-a:1: replica 0, stage 0, tensor rank 1",
    ]


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        ("A100-40GB", "NVIDIA A100-SXM4-40GB", True),
        ("A100-80GB", "NVIDIA A100 80GB PCIe", True),
        ("RTX-4090", "NVIDIA GeForce RTX 4090", True),
        ("RTX-4090", "NVIDIA GeForce RTX 3090", False),
        ("RTX-A6000", "NVIDIA RTX A6000", True),
        ("L40", "NVIDIA L4", False),
        ("V100-16GB", "Tesla V100-SXM2-16GB", True),
        ("H100-80GB", "NVIDIA H200", False),
        ("A10", "NVIDIA A100-SXM4-40GB", False),
        ("A10", "NVIDIA A10G", False),
        ("L40", "NVIDIA L40S", False),
        ("RTX-3080", "NVIDIA GeForce RTX 3080 Ti", False),
        ("RTX-3080-Ti", "NVIDIA GeForce RTX 3080 Ti", True),
        ("A100-80GB", "NVIDIA A100-SXM4-40GB", False),
        ("GH200-96GB", "NVIDIA GH200 480GB", True),
        ("MI250X", "AMD Instinct MI250X", True),
        ("MI250", "AMD Instinct MI250X", False),
        ("RTX-6000-Ada", "NVIDIA RTX 6000 Ada Generation", True),
        ("H100-80GB", "NVIDIA H100 80GB HBM3", True),
    ],
)
def test_gpu_names(wanted: str, found: str, same: bool) -> None:
    assert machine.names_match(wanted, found) is same


def test_a_megatron_symbol_of_unknown_source_is_not_replaced() -> None:
    replacement = Replacement(
        module="megatron.core.num_microbatches_calculator",
        name="get_num_microbatches",
        reason="a test",
        known={"0" * 16: "0.19.2"},
    )
    original = replacement.original()
    with pytest.raises(MegatronVersionError, match=fingerprint(original)):
        replacement.apply(lambda: 1)
    assert replacement.original() is original
    with pytest.raises(MegatronVersionError, match="is not there"):
        replace(replacement, name="nothing_of_that_name").apply(lambda: 1)


def test_a_replacement_is_idempotent_and_reverts() -> None:
    import megatron.core.num_microbatches_calculator as owner

    original = owner.get_num_microbatches
    replacement = Replacement(
        module=owner.__name__,
        name="get_num_microbatches",
        reason="a test",
        known={fingerprint(original): "0.19.2"},
    )
    replacement.apply(lambda: 1)
    replacement.apply(lambda: 2)
    assert owner.get_num_microbatches() == 2
    assert replacement.original() is original
    replacement.revert()
    assert owner.get_num_microbatches is original


def _on_hosts(asked: Plan) -> Plan:
    from megatron_hetero.plan.plan import Host

    stage = replace(asked.replicas[0].stages[0], devices=("node-a:0", "node-a:1"))
    replica = replace(asked.replicas[0], stages=(stage,))
    host = Host(node="node-a", host="a.example", gpu_type="RTX-4090", gpu_indices=(0, 1))
    return replace(asked, replicas=(replica,), hosts=(host,))


def test_nothing_is_printed_before_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron prints some thousand lines of arguments as it parses them."""
    refuse([*MODEL, f"--hetero-layout={LAYOUT}", "--tp-comm-overlap"], HeteroError)
    assert "num_layers" not in capsys.readouterr().out
