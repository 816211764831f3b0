from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.errors import FileFormatError, ModelError, UnsupportedError, UsageError
from megatron_hetero.model.load import load_workload, workload_hash
from megatron_hetero.model.spec import ModelSpec, TrainingSpec

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
        ("--transformer-impl local", {"flash_attention": False}),
        (
            "--transformer-impl local --attention-dropout 0",
            {"flash_attention": False, "attention_dropout": 0.0, "fused_scores": "divided"},
        ),
        (
            "--transformer-impl local --attention-dropout 0 --attention-backend unfused",
            {"flash_attention": False, "attention_dropout": 0.0},
        ),
        (
            "--transformer-impl local --attention-dropout 0 --softmax-type off-by-one",
            {"flash_attention": False, "attention_dropout": 0.0},
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
        ("--context-parallel-size 2", "context parallelism"),
        ("--yaml-cfg job.yaml", "a YAML configuration"),
        ("--rampup-batch-size 4 4 100", "a batch size that changes"),
        ("--position-embedding-type mrope", '"mrope"'),
        ("--optimizer muon", 'the optimizer "muon"'),
        ("--recompute-granularity selective --recompute-modules mlp", "without core_attn"),
    ],
)
def test_what_cannot_be_planned_yet_is_refused_by_name(flags: str, feature: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        load_workload(None, [*MINIMAL, *flags.split()])
    assert feature in str(error.value) and "not supported yet" in str(error.value)


def test_neutral_values_of_unsupported_flags_pass() -> None:
    load_workload(None, [*MINIMAL, "--context-parallel-size", "1", "--moe-layer-freq=1"])


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


def _script(folder: Path, text: str) -> Path:
    path = folder / "train.sh"
    path.write_text(text)
    return path


def test_a_needed_value_that_only_a_shell_knows_is_an_error(tmp_path: Path) -> None:
    flags = " ".join(MINIMAL).replace("--hidden-size 64", "--hidden-size $(size)")
    path = _script(tmp_path, f"python pretrain_gpt.py {flags}\n")
    with pytest.raises(ModelError) as error:
        load_workload(path)
    assert str(error.value) == (
        f"{path}:1: --hidden-size cannot be known without running the script: $(size) is not run; "
        "give it on our command line, after --: -- --hidden-size VALUE; "
        'or say what the script is started with: --model "run.sh ARGUMENT", --model-env NAME=VALUE'
    )
    assert load_workload(path, ["--hidden-size", "64"]).model.hidden_size == 64


def test_other_unknown_values_are_left_out_and_named(tmp_path: Path) -> None:
    flags = " ".join(MINIMAL)
    path = _script(
        tmp_path,
        f"python pretrain_gpt.py --save $1 {flags} --seed `date` --split 9,1 $MORE --bf16 $MORE",
    )
    workload = load_workload(path)
    assert workload.megatron_args == (*MINIMAL, "--split", "9,1", "--bf16")
    assert workload.source == str(path)
    more = "$MORE is not set in the script"
    assert [(part.name, part.reason) for part in workload.unread] == [
        ("--save", "$1 is an argument of the script"),
        ("--seed", "`date` is not run"),
        ("", more),
    ]
    assert str(workload.unread[0]).startswith(f"{path}:1: --save is left out: $1 is an argument")
    assert workload.training.precision == "bf16"


def test_a_switch_before_a_word_of_the_shell_is_kept_and_the_word_named(tmp_path: Path) -> None:
    text = f"python pretrain_gpt.py {' '.join(MINIMAL)} --use-mcore-models $(cat x) --bf16 $MORE\n"
    workload = load_workload(_script(tmp_path, text))
    assert workload.megatron_args[-2:] == ("--use-mcore-models", "--bf16")
    assert [part.name for part in workload.unread] == ["", ""]
    assert "$(cat x) is not run: the flags that it may hold are not" in str(workload.unread[0])


def test_what_may_hold_a_missing_flag_is_named(tmp_path: Path) -> None:
    flags = " ".join(MINIMAL).replace("--num-layers 4", "")
    with pytest.raises(
        ModelError, match=r"--num-layers is missing.*\n.*:1: \$\(cat x\) is not run"
    ):
        load_workload(_script(tmp_path, f"python pretrain_gpt.py {flags} --bf16 $(cat x)\n"))


def test_a_misspelt_flag_is_named_before_the_one_that_is_missing(tmp_path: Path) -> None:
    flags = " ".join(MINIMAL).replace("--num-layers", "--num-layer")
    with pytest.raises(ModelError) as error:
        load_workload(_script(tmp_path, f"python pretrain_gpt.py {flags}\n"))
    assert str(error.value).endswith(
        "train.sh:1: --num-layer is no flag of Megatron; did you mean --num-layers?"
    )


def test_variables_of_the_libraries_are_kept(tmp_path: Path) -> None:
    text = (
        "export NCCL_DEBUG=INFO GLOO_SOCKET_IFNAME=$(ip r)\nA=1\n"
        f"NVTE_DEBUG=$A python pretrain_gpt.py {' '.join(MINIMAL)}\n"
    )
    workload = load_workload(_script(tmp_path, text))
    assert workload.exports == ("NCCL_DEBUG=INFO", "NVTE_DEBUG=1")
    assert [part.name for part in workload.unread] == ["GLOO_SOCKET_IFNAME"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("if $X; then A+=(--swiglu); fi", "--swiglu cannot be known without running"),
        ("[ $X ] && A+=(--num-layers 8)", "--num-layers cannot be known without running"),
        ("if $X; then O=--swiglu; fi", "--swiglu cannot be known without running"),
        ("A+=(--bf16)\n$X || O=--swiglu", "--swiglu cannot be known without running"),
        ("A+=(--seed 1)\n$X || O=--swiglu", "--swiglu cannot be known without running"),
    ],
)
def test_flags_of_an_unknown_branch_are_not_guessed(
    tmp_path: Path, lines: str, message: str
) -> None:
    text = f"A=({' '.join(MINIMAL)})\n{lines}\npython pretrain_gpt.py ${{A[@]}} $O\n"
    with pytest.raises(ModelError, match=message):
        load_workload(_script(tmp_path, text))


def test_yaml_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not from YAML"):
        load_workload(tmp_path / "model.yaml")
    with pytest.raises(FileFormatError, match="cannot be read"):
        load_workload(tmp_path / "absent.sh")


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    script = _script(tmp_path, f"# a comment\npython pretrain_gpt.py {' '.join(MINIMAL)}")
    reference = workload_hash(load_workload(None, MINIMAL))
    assert workload_hash(load_workload(script)) == reference
    assert workload_hash(load_workload(script, ["--lr", "1"])) != reference
    assert workload_hash(load_workload(script, ["--num-layers", "5"])) != reference


WITHOUT_VOCABULARY = [*MINIMAL[:10], *MINIMAL[12:]]


@pytest.mark.parametrize(
    ("flags", "size", "note"),
    [
        ("--tokenizer-type GPT2BPETokenizer --vocab-file no/file.json", 50257, "assumed"),
        ("--vocab-file no/vocab.json --merge-file no/merges.txt", 50257, "assumed"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model no/file", 32000, "assumed"),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B",
            128256,
            "assumed",
        ),
        ("--tokenizer-type TikTokenizer --tokenizer-model no/file.json", 131072, "default"),
    ],
)
def test_a_tokenizer_says_the_vocabulary(flags: str, size: int, note: str) -> None:
    workload = load_workload(None, [*WITHOUT_VOCABULARY, *flags.split()])
    assert workload.model.vocab_size == size
    assert f"vocabulary of {size}: " in workload.source
    assert note in workload.source
    assert "--vocab-size" not in workload.megatron_args


def test_a_tokenizer_that_only_the_shell_knows(tmp_path: Path) -> None:
    """As in NVIDIA's scripts, whose files are parameters of the script."""
    path = tmp_path / "train.sh"
    path.write_text(
        "VOCAB_FILE=$1\nMERGE_FILE=$2\ntorchrun pretrain_gpt.py "
        + " ".join(WITHOUT_VOCABULARY)
        + " --vocab-file $VOCAB_FILE --merge-file $MERGE_FILE\n"
    )
    workload = load_workload(path)
    assert workload.model.vocab_size == 50257
    assert workload.unread_flags == ("--vocab-file", "--merge-file")


@pytest.mark.parametrize("kind", ["NullTokenizer", "GPTSentencePieceTokenizer"])
def test_a_tokenizer_that_does_not_say_it(kind: str) -> None:
    flags = [*WITHOUT_VOCABULARY, "--tokenizer-type", kind, "--tokenizer-model", "no/file"]
    with pytest.raises(ModelError, match="--vocab-size"):
        load_workload(None, flags)


def test_files_of_tokenizers_are_counted(tmp_path: Path) -> None:
    pieces = [b"\x0a\x03abc", b"\x0a\x01d\x15\x00\x00\x80\xbf"]
    model = b"".join(b"\x0a" + bytes([len(p)]) + p for p in pieces) + b"\x12\x02\x08\x01"
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "c": 2}')
    added = '[{"id": 1, "content": "b"}, {"id": 2, "content": "<eos>"}]'
    (tmp_path / "tokenizer.json").write_text(
        f'{{"added_tokens": {added}, "model": {{"vocab": {{"a": 0, "b": 1}}}}}}'
    )
    for flags, size in (
        (f"--tokenizer-type Llama2Tokenizer --tokenizer-model {tmp_path}/tokenizer.model", 2),
        (f"--tokenizer-type GPT2BPETokenizer --vocab-file {tmp_path}/vocab.json", 3),
        (f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}", 3),
    ):
        workload = load_workload(None, [*WITHOUT_VOCABULARY, *flags.split()])
        assert workload.model.vocab_size == size
        assert f"counted in {tmp_path}" in workload.source
    (tmp_path / "tokenizer.model").write_bytes(model[:-1])
    flags = f"--tokenizer-type Llama2Tokenizer --tokenizer-model {tmp_path}/tokenizer.model"
    with pytest.raises(ModelError, match=r"cut off.*--vocab-size N"):
        load_workload(None, [*WITHOUT_VOCABULARY, *flags.split()])
