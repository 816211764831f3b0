"""Launch scripts in the forms in which people have them, each with the job that it means."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.errors import ModelError
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.script import Script, read_script
from tests.timing import assert_within

SCRIPTS = Path(__file__).with_name("scripts")
SMALL = (
    "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 16 --vocab-size 32000"
)


def _read(name: str, *arguments: str, **given: str | None) -> Script:
    path = SCRIPTS / name
    return read_script(path, path.read_text(), arguments, given)


def _known(script: Script) -> str:
    return " ".join(word.text or "" for word in script.words if word.is_known)


def _shown(text: str, folder: Path = SCRIPTS) -> str:
    words = read_script(folder / "train.sh", text).words
    return " ".join((word.text or "") if word.is_known else "?" for word in words)


def test_a_launch_line_in_a_string_keeps_its_known_words() -> None:
    script = _read("srun-string.sh")
    assert _known(script).startswith("--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192")
    assert "--tokenizer-type NullTokenizer --split 100,0,0 --seq-length 4096" in _known(script)
    left = [word.text for word in script.words if not word.is_known and word.is_flag]
    assert left == ["--wandb-project", "--wandb-exp-name"]
    assert _known(_read("launcher-string.sh")).startswith("--num-layers 8")
    assert "--seq-length 1024 --vocab-size 32000 --bf16" in _known(_read("launcher-string.sh"))
    experts = "--num-experts 8 --moe-router-topk 2 --swiglu --bf16 --save /ckpt --load /ckpt"
    assert _known(_read("srun-string-of-experts.sh")).endswith(experts)


def test_a_sourced_file_beside_the_script_is_read() -> None:
    script = _read("sourced.sh")
    frequency = "[0,1,1,1,1,1,1,1,1,1,1,1]"
    assert (
        "--num-experts 8 --moe-ffn-hidden-size 512 --moe-router-topk 2 "
        f"--moe-layer-freq {frequency}" in _known(script)
    )
    assert all(word.is_known for word in script.words) and not script.unread
    assert load_workload(SCRIPTS / "sourced.sh").model.num_experts == 8
    assert load_workload(SCRIPTS / "sourced-array.sh").model.num_experts == 8


def test_an_array_of_a_file_that_is_missing_is_named() -> None:
    text = f'source ./absent.sh\ntorchrun pretrain_gpt.py {SMALL} "${{EXTRA_ARGS[@]}}"\n'
    script = read_script(SCRIPTS / "train.sh", text)
    assert "EXTRA_ARGS is not set in the script; perhaps in ./absent.sh" in script.words[-1].reason
    assert [part.name for part in script.unread if part.may_change_model] == ["./absent.sh"]


@pytest.mark.parametrize(
    ("arguments", "given", "layers", "batch"),
    [
        ((), {}, 16, 64),
        (("8B",), {"MP_VP": None, "MP_PP0_LAYERS": None, "MP_AC_LAYERS": None}, 32, 64),
        (("8B", "1", "256", "1e-5", "4096", "4", "2"), {"MP_VP": "", "MP_PP0_LAYERS": ""}, 32, 256),
    ],
)
def test_arguments_and_variables_can_be_said(
    arguments: tuple[str, ...], given: dict[str, str | None], layers: int, batch: int
) -> None:
    command = " ".join([str(SCRIPTS / "positional.sh"), *arguments])
    workload = load_workload(command, environment=given)
    assert workload.model.num_layers == layers
    assert workload.training.global_batch_size == batch
    if "MP_VP" in given:
        assert all(word.is_known for word in _read("positional.sh", *arguments, **given).words)


def test_overrides_of_the_form_name_value() -> None:
    assert load_workload(SCRIPTS / "overrides.sh").training.global_batch_size == 64
    script = _read("overrides.sh", "BS=128", "SEQ_LENGTH=4096")
    assert "--global-batch-size 128" in _known(script)
    assert "--seq-length 4096" in _known(script)
    assert "tee" not in _known(script)


def test_case_functions_and_the_words_given_to_them() -> None:
    read = _known(_read("case-and-function.sh"))
    assert read.startswith("--num-layers 16 --hidden-size 2048")
    assert read.endswith("--lr 1e-4 --swiglu --untie-embeddings-and-output-weights")
    assert _known(_read("case-and-function.sh", MODEL="125m")).startswith("--num-layers 12")
    with pytest.raises(ModelError, match=r":10: exit ends the script before it starts training"):
        _read("case-and-function.sh", MODEL="7b")


def test_quoted_defaults_and_modules() -> None:
    read = _read("quoted-default.sh")
    assert [w.text for w in read.words][-13:] == [
        "--save", "/ckpt/my run", "--data-path", "0.7", "/data/a", "0.3", "/data/b", "--swiglu",
        "--untie-embeddings-and-output-weights", "--num-experts", "8", "--moe-router-topk", "2",
    ]  # fmt: skip
    assert load_workload(SCRIPTS / "module.sh").model.num_layers == 12


@pytest.mark.parametrize(
    "end",
    ["2>&1 | tee out.log", "|& tee out.log", "> out.log 2>&1", ">> out.log", "&> out.log &",
     "; echo done", "&& touch ok", r"\$@", "2>err | cat", "|| exit 1"],
)  # fmt: skip
@pytest.mark.parametrize("how", ["eval $run_cmd", 'eval "$run_cmd"', 'srun bash -c "$run_cmd"'])
def test_an_operator_ends_the_flags(end: str, how: str) -> None:
    text = f'run_cmd="torchrun pretrain_gpt.py {SMALL} --bf16 {end}"\necho $run_cmd\n{how}\n'
    assert _shown(text) == f"{SMALL} --bf16"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=${A:-'x y'}\ntorchrun pretrain_gpt.py --a $A", "--a x y"),
        ('torchrun pretrain_gpt.py --a ${A-"x|y"} "${B:-"p q"}"', "--a x|y p q"),
        ("torchrun pretrain_gpt.py --a ${B:+--c $B} ${A:=d} $A", "--a d d"),
        ("f() { torchrun pretrain_gpt.py --a $2 ${@:3}; }\nf 1 2 3 4", "--a 2 3 4"),
        ("[[ 1 -lt 2 ]] && X=3\ntorchrun pretrain_gpt.py --a $X", "--a 3"),
        ("[ -z ${U} ] && X=3 || X=4\ntorchrun pretrain_gpt.py --a $X", "--a ?"),
        ("X=1\ncase $X in [0-9]) Y=n;; *) Y=o;; esac\ntorchrun pretrain_gpt.py --a $Y", "--a n"),
        ("ssh host 'cd /x && torchrun pretrain_gpt.py --a 1 > log'", "--a 1"),
        ("bash <<EOF\ntorchrun pretrain_gpt.py --a 1 \\$U\nEOF", "--a 1 ?"),
        ("X=$(( (4 > 1) ? 6 : 7 ))\ntorchrun pretrain_gpt.py --a $X", "--a 6"),
        ("declare -A M=([a]=1 [b]=2)\nK=b\ntorchrun pretrain_gpt.py --a ${M[$K]}", "--a 2"),
        ("for i in {1..3}; do A+=(--x $i); done\ntorchrun pretrain_gpt.py ${A[@]}",
         "--x 1 --x 2 --x 3"),
        ("CUDA_VISIBLE_DEVICES=0 torchrun -m megatron_hetero.pretrain_gpt --a 1", "--a 1"),
        ('MODEL_ARGS=" \\\n --num-layers 4 \\\n --bf16 "', "--num-layers 4 --bf16"),
        ("A='--num-layers 2'\n$LAUNCH $X $A --bf16 --lr 1 --save s",
         "? --num-layers 2 --bf16 --lr 1 --save s"),
    ],
)  # fmt: skip
def test_forms(text: str, words: str) -> None:
    assert _shown(text) == words


def test_numbers_as_megatron_takes_them() -> None:
    flags = SMALL.replace("32000", "32_000").split()
    assert load_workload(None, flags).model.vocab_size == 32000
    for wrong in ("32__000", "_32", "3e4", "3.2"):
        with pytest.raises(ModelError, match="must be a whole number"):
            load_workload(None, [*flags, "--vocab-size", wrong])


@pytest.mark.parametrize(
    "given", ["uniform --recompute-num-layers 4", "block --recompute-num-layers 2"]
)
def test_recompute_of_several_layers_is_set_aside_with_a_note(given: str) -> None:
    flags = f"{SMALL} --recompute-granularity full --recompute-method {given}"
    workload = load_workload(None, flags.split())
    assert workload.training.recompute == "full"
    assert workload.megatron_args[-4:] == (
        "--recompute-method", "uniform", "--recompute-num-layers", "1",
    )  # fmt: skip
    (part,) = workload.unread
    assert "recompute of" in part.name and not part.may_change_model


HOSTILE = {
    "a loop": "while true; do A=1; done\n",
    "a call of itself": "f() { f; }\nf\n",
    "a value that doubles": 'A=x\nwhile true; do A="$A$A"; done\n',
    "10 MB": "echo a b c d e f g h\n" * 500_000,
    "many appends": 'A="$A --x 1"\n' * 60_000,
    "many words": "R=(a)\n" + "R+=(--x 1 $U)\n" * 15_000,
    "many parts": "X=\nfor ((i = 0; i < 3000; i++)); do X=$(echo $X a $U); done\n",
    "brackets": "(" * 100_000,
    "substitutions": "$(" * 20_000,
    "ifs": "if true; then " * 5_000 + "x" + "; fi" * 5_000,
    "expansions": "a=" + "${a:-" * 3_000 + "x" + "}" * 3_000,
    "an open quote": "a '" + "x\n" * 200_000,
    "a character of no script": "torchrun pretrain_gpt.py --a \ue000",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(60)
def test_hostile_text_has_a_clear_answer_within_two_seconds(name: str) -> None:
    def refused() -> None:
        with pytest.raises(ModelError, match=r"train\.sh:\d+: "):
            read_script(Path("train.sh"), HOSTILE[name])

    assert_within(2, refused)


@pytest.mark.timeout(60)
def test_long_names_and_long_commands_are_read_within_two_seconds() -> None:
    name = "A" * 10_000
    text = f"{name}=1\nX=$(echo {'a $U ' * 2_000})\nX+=b\ntorchrun pretrain_gpt.py --a ${name} $X\n"
    assert_within(2, lambda: read_script(Path("train.sh"), text))
    words = read_script(Path("train.sh"), text).words
    assert [word.text for word in words[:3]] == ["--a", "1", "a"]


def test_a_here_document_of_anything_is_skipped() -> None:
    text = (
        "cat <<'E' > x\n"
        + "".join(map(chr, range(1, 9_000)))
        + "\nE\ntorchrun pretrain_gpt.py --a 1"
    )
    assert _shown(text) == "--a 1"
