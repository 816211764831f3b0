"""A job from its flags: the model, the training, and what is refused."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.errors import FileFormatError, ModelError, UnsupportedError, UsageError
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "a100-rtx4090" / "gpt-7b.sh"

MINIMAL = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 128 "
    "--max-position-embeddings 256 --vocab-size 1000 --global-batch-size 16 "
    "--micro-batch-size 2"
)


def test_defaults_are_megatrons() -> None:
    workload = load_workload(None, MINIMAL)
    assert workload.model == ModelSpec(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=8,
        num_query_groups=8,
        kv_channels=8,
        vocab_size=1000,
        seq_length=128,
        max_position_embeddings=256,
    )
    assert workload.training == TrainingSpec(global_batch_size=16, micro_batch_size=2)
    assert workload.megatron_args == tuple(MINIMAL)
    assert workload.source == "command line"


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("--swiglu", {"gated_mlp": True, "ffn_hidden_size": 128}),
        ("--quick-geglu", {"gated_mlp": True}),
        ("--swiglu --ffn-hidden-size 96", {"gated_mlp": True, "ffn_hidden_size": 96}),
        ("--group-query-attention --num-query-groups 4", {"num_query_groups": 4}),
        ("--group-query-attention", {"num_query_groups": 1}),
        ("--num-query-groups 4", {}),  # without the switch Megatron ignores it
        ("--kv-channels 16", {"kv_channels": 16}),
        ("--untie-embeddings-and-output-weights", {"tied_embeddings": False}),
        ("--disable-bias-linear --add-qkv-bias", {"add_bias_linear": False, "add_qkv_bias": True}),
        ("--normalization RMSNorm", {"normalization": "RMSNorm"}),
        ("--position-embedding-type rope", {"position_embedding": "rope"}),
        ("--use-rotary-position-embeddings", {"position_embedding": "rope"}),
        ("--position-embedding-type none", {"position_embedding": "none"}),
        ("--qk-layernorm", {"qk_layernorm": True}),
        ("--make-vocab-size-divisible-by 64", {"make_vocab_size_divisible_by": 64}),
        (
            "--num-experts 8",
            {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 256},
        ),
        (
            "--num-experts=8 --moe-router-topk=1 --moe-ffn-hidden-size=32",
            {"num_experts": 8, "moe_router_topk": 1, "moe_ffn_hidden_size": 32},
        ),
        ("--seq-length 256", {"seq_length": 256}),
    ],
)
def test_model_flags(flags: str, changes: dict[str, object]) -> None:
    base = load_workload(None, MINIMAL).model
    assert load_workload(None, [*MINIMAL, *flags.split()]).model == replace(base, **changes)


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("--bf16", {"precision": "bf16"}),
        ("--fp16", {"precision": "fp16"}),
        ("--sequence-parallel", {"sequence_parallel": True}),
        ("--optimizer sgd", {"optimizer": "sgd"}),
        ("--use-distributed-optimizer", {"use_distributed_optimizer": True}),
        ("--calculate-per-token-loss", {"per_token_loss": True}),
        ("--recompute-activations", {"recompute": "selective"}),
        (
            "--bf16 --fp8-format hybrid --fp8-param-gather --use-distributed-optimizer",
            {
                "precision": "bf16",
                "fp8": True,
                "fp8_recipe": "delayed",
                "fp8_param_gather": True,
                "use_distributed_optimizer": True,
            },
        ),
        ("--cp-comm-type a2a", {"cp_comm_type": "a2a"}),
        ("--cp-comm-type all_gather all_gather", {"cp_comm_type": "all_gather"}),
        ("--cp-comm-type a2a a2a a2a p2p", {}),
        ("--recompute-granularity selective", {"recompute": "selective"}),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            {"recompute": "full"},
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
            {"recompute": "full"},
        ),
        ("--attention-backend flash", {}),
        ("--attention-backend unfused", {"flash_attention": False}),
        ("--kv-channels 40", {}),
        ("--kv-channels 42", {"flash_attention": False}),
        ("--kv-channels 264", {"flash_attention": False}),
        ("--transformer-impl local", {"local_layers": True, "flash_attention": False}),
        (
            "--transformer-impl local --attention-dropout 0",
            {
                "local_layers": True,
                "flash_attention": False,
                "attention_dropout": 0.0,
                "fused_scores": "divided",
            },
        ),
        (
            "--transformer-impl local --attention-dropout 0 --attention-backend unfused",
            {"local_layers": True, "flash_attention": False, "attention_dropout": 0.0},
        ),
        (
            "--transformer-impl local --attention-dropout 0 --softmax-type off-by-one",
            {"local_layers": True, "flash_attention": False, "attention_dropout": 0.0},
        ),
    ],
)
def test_training_flags(flags: str, changes: dict[str, object]) -> None:
    base = load_workload(None, MINIMAL).training
    assert load_workload(None, [*MINIMAL, *flags.split()]).training == replace(base, **changes)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layers 0", "--num-layers is 0; it must be at least 1"),
        ("--num-layers 4.0", '--num-layers is "4.0"; it must be a whole number'),
        ("--num-layers 1e9", "it must be a whole number"),
        ("--num-layers ٤", "it must be a whole number"),
        ("--num-layers 99999999999", "below 2^31"),
        ("--num-layers", "--num-layers has no value"),
        ("--num-layers=", "--num-layers has no value"),
        ("--num-layers 4 5", '--num-layers takes one value, and "5" follows it'),
        ("--bf16 yes", '--bf16 takes no value, and "yes" follows it'),
        ("--bf16 --fp16", "both --bf16 and --fp16 are given; keep one of them"),
        (
            "--num-experts 8 --moe-router-padding-for-quantization",
            "--moe-router-padding-for-quantization goes with --fp8-format alone",
        ),
        (
            "--num-experts 8 --moe-router-padding-for-fp8 --fp8-format hybrid",
            "goes with --moe-token-dispatcher-type alltoall or flex alone, and the job's is allg",
        ),
        (
            "--bf16 --fp8-param-gather --use-distributed-optimizer",
            "--fp8-param-gather goes with --fp8-format alone",
        ),
        (
            "--bf16 --fp8-format hybrid --fp8-param-gather",
            "--fp8-param-gather goes with --use-distributed-optimizer alone",
        ),
        (
            "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather "
            "--use-distributed-optimizer",
            "--fp8-param-gather goes with --reuse-grad-buf-for-mxfp8-param-ag alone",
        ),
        (
            "--bf16 --reuse-grad-buf-for-mxfp8-param-ag",
            "--reuse-grad-buf-for-mxfp8-param-ag goes with --fp8-param-gather alone",
        ),
        ("--num-attention-heads 7", "--num-attention-heads 7 does not divide --hidden-size 64"),
        (
            "--group-query-attention --num-query-groups 3",
            "--num-query-groups 3 does not divide --num-attention-heads 8",
        ),
        ("--seq-length 512", "--max-position-embeddings 256 is less than --seq-length 512"),
        ("--global-batch-size 15", "--global-batch-size 15 is not a multiple"),
        ("--normalization BatchNorm", 'is "BatchNorm"; allowed: LayerNorm, RMSNorm'),
        ("--num-experts 2 --moe-router-topk 3", "--moe-router-topk 3 is more than --num-experts 2"),
        ("--recompute-granularity full", "needs --recompute-method and --recompute-num-layers"),
        ("--hidden-size 16 --swiglu", "add --ffn-hidden-size"),
    ],
)
def test_impossible_models_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ModelError) as error:
        load_workload(None, [*MINIMAL, *flags.split()])
    assert str(error.value).startswith("command line: ")
    assert message in str(error.value)


def test_words_before_the_first_flag_are_refused() -> None:
    with pytest.raises(ModelError, match='"pretrain" stands before the first flag'):
        load_workload(None, ["pretrain", *MINIMAL])


@pytest.mark.parametrize("index", range(0, len(MINIMAL), 2))
def test_a_missing_flag_says_how_to_give_it(index: int) -> None:
    flag = MINIMAL[index]
    with pytest.raises(ModelError) as error:
        load_workload(None, MINIMAL[:index] + MINIMAL[index + 2 :])
    assert flag in str(error.value).partition(" is missing; add it: ")[0]
    assert f"-- {flag} " in str(error.value)


def test_missing_flags_are_named_together(tmp_path: Path) -> None:
    path = tmp_path / "flags.txt"
    path.write_text("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64\n")
    with pytest.raises(ModelError) as error:
        load_workload(path, ["--micro-batch-size", "1"])
    assert str(error.value) == (
        f"{path}: --vocab-size (the tokenizer's flags and files here do not say it), "
        "--max-position-embeddings and --global-batch-size are missing; add them there, or on our "
        "command line: -- --vocab-size N --max-position-embeddings N --global-batch-size N"
    )


def test_an_old_plan_in_a_script_gives_way_to_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "flags.txt"
    path.write_text(" ".join([*MINIMAL, "--hetero-plan old.json"]))
    assert "--hetero-plan" not in load_workload(path).megatron_args
    with pytest.raises(UsageError, match="--hetero-layout is decided by the plan"):
        load_workload(path, ["--hetero-layout", "tp1:4 @2"])


@pytest.mark.parametrize(
    ("flags", "feature"),
    [
        ("--hierarchical-context-parallel-sizes 2 2", "context parallelism in levels"),
        ("--cp-comm-type a2a+p2p", "context parallelism in levels"),
        ("--yaml-cfg job.yaml", "a YAML configuration"),
        ("--rampup-batch-size 4 4 100", "a batch size that changes"),
        ("--position-embedding-type mrope", '"mrope"'),
        ("--optimizer muon", 'the optimizer "muon"'),
    ],
)
def test_what_cannot_be_planned_yet_is_refused_by_name(flags: str, feature: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        load_workload(None, [*MINIMAL, *flags.split()])
    assert feature in str(error.value) and "not supported yet" in str(error.value)


def test_a_script_with_context_parallelism_is_planned_without(tmp_path: Path) -> None:
    path = tmp_path / "flags.txt"
    path.write_text(" ".join([*MINIMAL, "--context-parallel-size 2 --cp-comm-type p2p"]))
    assert "--context-parallel-size" not in load_workload(path).megatron_args
    with pytest.raises(UsageError, match="--context-parallel-size is decided by the plan"):
        load_workload(path, ["--context-parallel-size", "2"])


@pytest.mark.parametrize("flag", ["--batch-size 4", "--warmup 1", "--checkpoint-activations"])
def test_flags_that_megatron_takes_no_longer_are_refused(flag: str) -> None:
    with pytest.raises(ModelError, match=f"takes {flag.split()[0]} no longer; use --"):
        load_workload(None, [*MINIMAL, *flag.split()])


def test_the_example_is_a_7b_model() -> None:
    workload = load_workload(EXAMPLE)
    assert workload.model.num_layers == 32 and workload.model.ffn_hidden_size == 11008
    assert workload.training.precision == "bf16"
    assert workload.source == str(EXAMPLE)
    # The plan decides the parallel sizes; the rest is kept, in order.
    assert "--tensor-model-parallel-size" not in workload.megatron_args
    assert workload.megatron_args[:2] == ("--num-layers", "32")
    assert workload.megatron_args[-4:] == (
        "--save", "checkpoints/gpt-7b", "--load", "checkpoints/gpt-7b",
    )  # fmt: skip


def test_typed_flags_beat_the_script() -> None:
    workload = load_workload(EXAMPLE, ["--global-batch-size", "48", "--fp16", "--log-throughput"])
    assert workload.training.global_batch_size == 48
    assert workload.training.precision == "fp16" and "--bf16" not in workload.megatron_args
    assert workload.megatron_args.count("--global-batch-size") == 1
    assert workload.megatron_args[-1] == "--log-throughput"


@pytest.mark.parametrize(
    "typed",
    [
        ["--tensor-model-parallel-size", "2"],
        ["--pipeline-model-parallel-size=2"],
        ["--pipeline-model-parallel-layout", "Et|tL"],
        ["--num-layers-per-virtual-pipeline-stage", "1"],
        ["--use-tp-pp-dp-mapping"],
    ],
)
def test_typed_flags_that_the_plan_decides_are_refused(typed: list[str]) -> None:
    with pytest.raises(UsageError, match=typed[0].split("=")[0]):
        load_workload(EXAMPLE, typed)


@pytest.mark.parametrize("text", ["torchrun pretrain_gpt.py " + "--bf16 " * 60, "x" * 300])
def test_a_command_in_the_place_of_its_file_is_refused(text: str) -> None:
    """It is longer than a file's name can be."""
    with pytest.raises(FileFormatError, match="cannot be read"):
        load_workload(Path(text), ())


def test_yaml_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not from YAML"):
        load_workload(tmp_path / "model.yaml")
    with pytest.raises(FileFormatError, match="cannot be read"):
        load_workload(tmp_path / "absent.sh")
