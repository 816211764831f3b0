"""Exit code 0 of `plan` says that nothing open in a script can change the model: generated scripts,
of which bash makes other jobs in other environments.

Defaults (`${W:+--swiglu}`) are read as for a variable that is not set, as the docs say.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from megatron_hetero.errors import HeteroError
from megatron_hetero.model.load import load_workload
from tests.model.shell.generated import by_bash

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
JOB = (
    "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 16 --vocab-size 32000"
)
HARMLESS = ["--save /x", "--lr 1e-4", "--seed $U", "--log-interval 5", "--tensorboard-dir t$U"]
CHANGING = [
    "--swiglu",
    "--num-experts 8 --moe-router-topk 2",
    "--untie-embeddings-and-output-weights",
    "--ffn-hidden-size 2048",
    "--group-query-attention --num-query-groups 4",
    "--bf16",
    "--num-layers 1$U",
]
FORMS = [
    '[ -n "$U" ] && X="$X {flag}"',
    'if [ "$V" = 1 ]; then R+=({flag}); fi',
    'X="$X $(echo {flag} $V)"',
    'X="$(echo $V {flag}) $X"',
    'case "$U" in x) X+=" {flag}";; *) X+=" --log-interval 1";; esac',
    'case "$W" in "") R+=({flag});; esac',
    "R+=($V {flag})",
    "for f in $V; do R+=({flag}); done",
    'f() {{ [ "$1" = x ] || R+=({flag}); }}; f "$U"',
    'g() {{ if [ "$U" = 1 ]; then return; fi; X="$X {flag}"; }}; g',
    'eval "X=\\"\\$X {flag}\\""',
    'X="$X ${{D:+{flag}}}"',
    '[[ "$U$W" == x* ]] || R=("${{R[@]}}" {flag})',
    'while [ -z "$D" ]; do D=1; R+=({flag}); done',
    'IFS=$V; X="$X {flag}"; unset IFS',
    'read -r Z <<< "$V"; X="$X {flag}"; R+=($Z)',
]
scripts = st.builds(
    lambda body, launch: "\n".join(["X=; R=()", *body, launch]),
    st.lists(
        st.builds(
            lambda form, flag: form.format(flag=flag),
            st.sampled_from(FORMS),
            st.sampled_from([*HARMLESS, *CHANGING]),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(
        [
            f'torchrun pretrain_gpt.py {JOB} $X "${{R[@]}}"',
            f'Y="torchrun pretrain_gpt.py {JOB} $X ${{R[*]}}"\nbash -c "$Y 2>&1"',
            f"torchrun pretrain_gpt.py $X {JOB} ${{R[@]}} --log-interval 2",
        ]
    ),
)
ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {"U": "x", "V": "--swiglu"},
    {"U": "1", "V": "1"},
    {"U": "2", "V": "--num-experts 4", "W": "w"},
    {"W": "1", "V": "1 2"},
]


def _check(folder: Path, script: str) -> None:
    path = folder / "train.sh"
    path.write_text(script)
    try:
        read = load_workload(path)
    except HeteroError:
        return
    if any(part.may_change_model for part in read.unread):
        return
    for environment in ENVIRONMENTS:
        started = by_bash(script, folder, environment)
        try:
            ran = load_workload(None, (started or [[""]])[-1][1:])
        except HeteroError:
            continue  # Megatron would not start, or start what is not planned
        note(f"{script}\n{environment}: {started}\n{read.unread}")
        assert (ran.model, ran.training) == (read.model, read.training)


_QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=60, deadline=None, suppress_health_check=_QUIET)
@given(scripts)
def test_exit_code_0_says_that_the_model_is_known(tmp_path: Path, script: str) -> None:
    _check(tmp_path, script)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=_QUIET)
@given(scripts)
def test_exit_code_0_says_that_the_model_is_known_in_many_scripts(
    tmp_path: Path, script: str
) -> None:
    _check(tmp_path, script)


@pytest.mark.parametrize(
    "tail",
    [
        "--tensor-model-parallel-size 8 $MORE",
        "--save /a $MORE --save /b",
        "--num-layers 12 $MORE --num-layers 12",
        "--save /a $MORE 8",
        "--bf16 $MORE",
        "$MORE --bf16",
    ],
)
def test_an_unknown_word_behind_any_flag_is_named(tail: str, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"torchrun pretrain_gpt.py {JOB} {tail}\n")
    for typed in ([], ["--save", "/c"]):
        (part,) = load_workload(path, typed).unread
        assert part.may_change_model and part.reason == "$MORE is not set in the script"
