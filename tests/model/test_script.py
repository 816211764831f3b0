from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import ModelError, UnsupportedError
from megatron_hetero.model.script import read_megatron_words

SCRIPT = Path("train.sh")


def _texts(text: str) -> list[str | None]:
    return [w.text for w in read_megatron_words(SCRIPT, text)]


FULLY_KNOWN = [
    "python pretrain_gpt.py --num-layers 4 --bf16",
    "python pretrain_gpt.py \\\n  --num-layers 4 \\\n  --lr=1e-4",
    "N=4\npython pretrain_gpt.py --num-layers $N --hidden-size ${H:-64} --x ${N:-5}",
    'A=( --a 1 "b c" )\nA+=( --d )\npython pretrain_gpt.py "${A[@]}" --e',
    "A=( --a 1 )\npython pretrain_gpt.py ${A[*]} $@",
    'O="--a 1"\nO="$O --b 2"\nO+=" --c"\npython pretrain_gpt.py $O',
    "O='--a 1'\npython pretrain_gpt.py --o \"$O\" '$O' x$O",
    "export A=1 B=2\ndeclare -r C=3\npython pretrain_gpt.py --abc $A$B${C}",
    ': "${M:=7}"\npython pretrain_gpt.py --m $M --n "${M}x"',
    "E=\npython pretrain_gpt.py --a $E --b \"$E\" --c ${E:-d} --f ${E-g}",
    "python pretrain_gpt.py --split 949,50,1 --neg -1 --path a/b_c.d 2>&1 | cat",
    "cd . && python pretrain_gpt.py --a",
    "# python pretrain_gpt.py --no\npython pretrain_gpt.py --yes # --no",
    "M=4\nG=$((M*64))\npython pretrain_gpt.py --a $G --b $(( (M+1) * -2 )) --c $((-7/2)) $((-7%2))",
    "A=3 B=010\npython pretrain_gpt.py --a $((2**A**2 - B)) --b $((${A}+$B+0x1f)) --c x$((A))y",
]  # fmt: skip


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize("text", FULLY_KNOWN)
def test_known_scripts_are_read_as_bash_reads_them(text: str, tmp_path: Path) -> None:
    # `python` prints its arguments, each ended by a NUL.
    script = 'python() { shift; printf "%s\\0" "$@"; }\n' + text
    output = subprocess.run(
        ["bash", "-c", script], capture_output=True, check=True, cwd=tmp_path, env={}
    ).stdout
    assert _texts(text) == output.decode().split("\0")[:-1]


def test_torchrun_flags_are_not_megatrons() -> None:
    text = (
        "D=(--nproc_per_node 8 --nnodes 2)\nM=(--num-layers 4)\nUNUSED=(--junk 1)\n"
        'CUDA_VISIBLE_DEVICES=0 torchrun "${D[@]}" /opt/m/pretrain_gpt.py "${M[@]}" --bf16'
    )
    assert _texts(text) == ["--num-layers", "4", "--bf16"]


@pytest.mark.parametrize(
    "program",
    [
        *("x/pretrain_bert.py", "-m a.pretrain_mamba", "train_rl.py"),
        *("tools/run_text_generation_server.py", "tools/run_mamba_text_generation_server.py"),
    ],
)
def test_scripts_that_train_no_gpt_are_refused(program: str) -> None:
    with pytest.raises(UnsupportedError, match=r"train.sh:1: \w+(\.py)? does not train a GPT"):
        _texts(f"torchrun {program} --num-layers 4 --hidden-size 64")
    assert _texts("torchrun pretrain_hybridgpt.py --bf16") == ["--bf16"]


def test_a_script_whose_flags_stand_in_another_file_names_that_file() -> None:
    with pytest.raises(ModelError, match=r"train.sh:2: run.sh is started, and its text is not"):
        _texts("export A=1\nsrun --label $ROOT/run.sh 8B")


def test_the_training_script_is_preferred_to_other_commands() -> None:
    text = (
        "python preprocess_data.py --input x\npython pretrain_gpt.py --num-layers 4\n"
        "python report.py --out y\n"
    )
    assert _texts(text) == ["--num-layers", "4"]


def test_a_command_inside_a_string_is_found() -> None:
    text = 'F="--num-layers 4"\nRUN="python -u pretrain_gpt.py $F"\nsrun -l sh -c "cd x; ${RUN}"'
    assert _texts(text) == ["--num-layers", "4"]


def test_without_a_command_all_arrays_with_flags_count() -> None:
    assert _texts("N=2\nA=(--a 1)\nB=(host0 host1)\nC=(--c $N)\n") == ["--a", "1", "--c", "2"]


def test_a_file_of_flags() -> None:
    text = "# GPT\n--num-layers 4\n--lr 1e-4 --bf16\n\n--data-path 'a b'\n"
    assert _texts(text) == ["--num-layers", "4", "--lr", "1e-4", "--bf16", "--data-path", "a b"]


def test_where_a_word_was_written() -> None:
    text = "A=(\n  --num-layers 4\n)\npython pretrain_gpt.py ${A[@]} \\\n  --bf16\n"
    assert [w.where for w in read_megatron_words(SCRIPT, text)] == [
        "train.sh:2",
        "train.sh:2",
        "train.sh:5",
    ]
    text = 'B=1\nA="--num-layers 4 --lr $B"\npython pretrain_gpt.py $A \\\n  --bf16\n'
    assert [w.where[-1] for w in read_megatron_words(SCRIPT, text)] == list("22224")
    hidden = read_megatron_words(SCRIPT, text.replace("B=1", "B=$1"))
    assert [w.where[-1] for w in hidden] == list("22224")
    assert hidden[3].reason == "B (line 1) depends on $1, which is an argument of the script"


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("X=$(date)", "X (line 1) depends on $(date), which is not run"),
        ("X=`nproc`", "X (line 1) depends on `nproc`, which is not run"),
        ("X=$((2 ? 3))", "X (line 1) is set in what is not understood"),
        ("X=$((2 / 0))", "X (line 1) depends on $((2 / 0)), which is a division by zero"),
        ("Y=a\nX=$((2 * Y))", 'X (line 2) depends on $((2 * Y)), which has Y, which is "a"'),
        ("X=$((2 * $1))", "X (line 1) depends on $1, which is an argument of the script"),
        ("Y=$(nproc)\nX=$((Y * 2))", "Y (line 1) depends on $(nproc), which is not run"),
        ("X=${Y%.sh}", "X (line 1) depends on $Y, which is not set in the script"),
        ("Y=a\nX=${Y@Q}", "X (line 2) depends on ${Y@Q}, which is not run"),
        ("", "$X is not set in the script"),
        (
            "source ./env.sh",
            "$X is not set in the script; perhaps in ./env.sh (line 1), which is not read",
        ),
        ('Y="--b $Z"\nX=$Y', "$Z (line 1) is not set in the script"),
        ("X=$2", "X (line 1) depends on $2, which is an argument of the script"),
        ("R=a-$(date is)\nX=/x/$R", "R (line 1) depends on $(date is), which is not run"),
        (
            "if [ $Y ]; then\n X=1\nfi",
            "X (line 2) is set inside the `if` of line 1, which is not run",
        ),
        (
            "for X in $Y; do\nX=3; done",
            "X (line 2) is set inside the `for` of line 1, which is not run",
        ),
        (
            "case $1 in\n a) X=1;;\nesac",
            "X (line 2) is set inside the `case` of line 1, which is not run",
        ),
        ("[ $Y ] && X=1", "X (line 1) is set after && or || on line 1, which is not run"),
        ("f() {\n X=1\n}", "$X is not set in the script"),
        (
            "f() {\n $Y && return\n X=1\n}\nf",
            "X (line 3) is set inside the function `f`, which is not run",
        ),
    ],
)
def test_what_only_a_shell_knows_has_a_reason(assignment: str, reason: str) -> None:
    text = f"{assignment}\npython pretrain_gpt.py --x $X"
    flag, *_, value = read_megatron_words(SCRIPT, text)
    assert (flag.text, flag.reason) == ("--x", "")
    assert (value.text, value.reason) == (None, reason)


def test_the_known_words_of_a_variable_are_kept_beside_an_unknown_one() -> None:
    text = (
        "RUN=x-$(date +%Y%m%d)\nROOT=/data/runs/$RUN\n"
        'OUT="--save $ROOT/ckpt --load $ROOT/ckpt --save-interval 500 --eval-interval 500"\n'
        "python pretrain_gpt.py --bf16 $OUT"
    )
    words = read_megatron_words(SCRIPT, text)
    shown = " ".join(word.text or "?" for word in words)
    assert shown == "--bf16 --save ? --load ? --save-interval 500 --eval-interval 500"
    reason = "RUN (line 1) depends on $(date +%Y%m%d), which is not run"
    assert [word.reason for word in words if word.text is None] == [reason, reason]


@given(st.integers(-99, 99), st.integers(1, 99), st.sampled_from(["+", "-", "*", "/", "%"]))
def test_arithmetic_is_c_s(left: int, right: int, operator: str) -> None:
    text = f"A={left}\npython pretrain_gpt.py --x=$((A {operator} {right}))"
    exact = {
        "+": left + right, "-": left - right, "*": left * right,
        "/": int(left / right), "%": left - right * int(left / right),
    }  # fmt: skip
    assert _texts(text) == [f"--x={exact[operator]}"]


@pytest.mark.parametrize(
    ("script", "value"),
    [
        ('Y=a\nif [ "$Y" = a ]; then\n X=1\nfi', "1"),
        ("Y=a\nX=0\nif [[ $Y == b ]]; then\n X=1\nfi", "0"),
        ("Y=a\nif [[ $Y == b ]]; then X=1; elif [[ $Y == a ]]; then X=2; else X=3; fi", "2"),
        ("Y=c\nif [[ $Y == b ]]; then X=1; elif [[ $Y == a ]]; then X=2; else X=3; fi", "3"),
        ('if [[ "${1:-MOCK}" == "MOCK" ]] || [[ -z "$T" ]]; then X=1; else X=2; fi', "1"),
        ("N=4\nX=0\nif [ $N -gt 8 ] && [ -f y ]; then X=1; fi", "0"),
        ("N=4\nif ! [ $N -gt 8 ]; then X=1; fi", "1"),
        ('if [ ! -z "a" ]; then\n if [ -n "" ]; then X=1; else X=2; fi\nfi', "2"),
        ("X=0\nif [ a = b ]; then\n for i in 1 2; do if [ a = a ]; then X=1; fi; done\nfi", "0"),
        ("X=0\nwhile [[ $# -gt 0 ]]; do\n case $1 in\n  --x) X=$2; shift 2;;\n esac\ndone", "0"),
        ("if true; then X=1; fi", "1"),
    ],
)
def test_a_branch_that_the_text_decides_is_followed(script: str, value: str) -> None:
    assert _texts(f"{script}\npython pretrain_gpt.py --x $X") == ["--x", value]


@pytest.mark.parametrize(
    "condition",
    [
        '[ -n "$UNSET" ]',
        "[[ $Y == $(date)* ]]",
        "[[ $Y =~ (a)\\1 ]]",
        "[ -f file ]",
        "grep -q x y",
        "[ a = a ] | tee log",
        "[ x -gt 1 ]",
        "(( UNSET > 0 ))",
        "[[ $Y == a && $UNSET == a ]]",
    ],
)
def test_a_branch_that_only_a_shell_knows_is_not(condition: str) -> None:
    text = f"Y=a\nif {condition}; then X=1; fi\npython pretrain_gpt.py --x $X"
    assert read_megatron_words(SCRIPT, text)[1].text is None


def test_flags_added_under_a_condition_keep_their_text() -> None:
    text = "A=(--a)\nif $X; then A+=(--fp16 --b $N); fi\npython pretrain_gpt.py ${A[@]}"
    words = read_megatron_words(SCRIPT, text)
    assert [w.text for w in words] == ["--a", "--fp16", "--b", None]
    assert [w.is_conditional for w in words] == [False, True, True, True]


@pytest.mark.parametrize("text", ["", "echo hello", "python pretrain_gpt.py", "A=(1 2)"])
def test_no_flags_at_all_is_an_error(text: str) -> None:
    with pytest.raises(ModelError, match=r"train\.sh:1: no Megatron flags found"):
        _texts(text)


def test_a_value_left_to_the_reader_is_asked_for() -> None:
    hint = "put values in place of <...>"
    with pytest.raises(ModelError, match=hint):
        _texts("DATA=<Specify path>\npython pretrain_gpt.py --num-layers 2 --data-path $DATA")
    with pytest.raises(ModelError) as error:
        _texts("if <<EOF")
    assert hint not in str(error.value)


@given(st.text(alphabet="aAB=$(){}[]'\"`\\|&;#@-+: \nifthendo", max_size=80))
def test_any_text_is_words_or_a_model_error(text: str) -> None:
    try:
        words = read_megatron_words(SCRIPT, text + "\npython pretrain_gpt.py --last 1")
    except ModelError as error:
        assert str(error).startswith("train.sh:")
    else:
        assert all(w.text is not None or w.reason for w in words)
