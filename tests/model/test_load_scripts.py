"""Scripts whose flags only a shell knows: what is left out, named or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.errors import ModelError, UsageError
from megatron_hetero.model.load import load_workload, workload_hash
from tests.model.test_load import MINIMAL


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


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    script = _script(tmp_path, f"# a comment\npython pretrain_gpt.py {' '.join(MINIMAL)}")
    reference = workload_hash(load_workload(None, MINIMAL))
    assert workload_hash(load_workload(script)) == reference
    assert workload_hash(load_workload(script, ["--lr", "1"])) != reference
    assert workload_hash(load_workload(script, ["--num-layers", "5"])) != reference


def test_a_setting_that_is_added_changes_no_hash_of_jobs_without_it() -> None:
    """Fields that plan.json leaves out at their defaults come from release to release."""
    known = "b3e52a94177e017eee76e74dc5f28ce77e3f1ba9c7c6c0734dcdd0c3673d7011"
    assert workload_hash(load_workload(None, MINIMAL)) == known
    for flags in ("--cp-comm-type a2a", "--attention-output-gate"):
        assert workload_hash(load_workload(None, [*MINIMAL, *flags.split()])) != known


def test_a_variable_that_no_script_reads_is_refused(tmp_path: Path) -> None:
    """A mistyped name would leave the default in its place in silence."""
    flags = " ".join(MINIMAL).replace("--hidden-size 64", "--hidden-size ${SIZE:-64}")
    path = _script(tmp_path, f"source ./more.sh\ntorchrun pretrain_gpt.py {flags} $MORE\n")
    more = 'if [ "$KIND" = long ]; then MORE="--seed 5"; else MORE=; fi\n'
    (tmp_path / "more.sh").write_text(more)
    given: dict[str, str | None] = {"SIZE": "128", "KIND": "long", "NCCL_DEBUG": "INFO"}
    workload = load_workload(path, environment=given)
    assert workload.model.hidden_size == 128 and "--seed" in workload.megatron_args
    with pytest.raises(UsageError, match=r'--model-env SISE: .* \(did you mean "SIZE"'):
        load_workload(path, environment={"KIND": "", "SISE": "128"})
    # A file that is not there may read it.
    path.write_text(f"source ./absent.sh\ntorchrun pretrain_gpt.py {flags}\n")
    assert load_workload(path, environment={"OTHER": "1"}).model.hidden_size == 64
    for other in (None, tmp_path / "config.json", tmp_path):
        with pytest.raises(UsageError, match="--model-env is what a script of --model"):
            load_workload(other, environment={"SIZE": "1"})
