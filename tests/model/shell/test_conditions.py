"""Conditions of scripts: bash decides them likewise, and what only bash knows stays open."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.model.script import read_script

RUN = "\npython pretrain_gpt.py $X --end\n"


def given(tmp_path: Path, script: str) -> list[str | None]:
    """Return the words of the job; None for one that is not known."""
    read = read_script(tmp_path / "train.sh", script + RUN)
    return [word.text if word.is_known else None for word in read.words]


@pytest.mark.parametrize("condition", ["[[ $Y =~ (A)(B) ]]", "[[ $UNSET =~ (A) ]]"])
def test_what_a_regular_expression_found_is_not_known(tmp_path: Path, condition: str) -> None:
    script = f'Y=AB\n{condition}\nX="--seed 1${{BASH_REMATCH[1]}}"'
    assert given(tmp_path, script)[1] is None


def test_a_point_matches_a_newline(tmp_path: Path) -> None:
    script = "Y=$'a\\nb'\nX=no\nif [[ $Y =~ ^a.b$ ]]; then X=yes; fi"
    assert given(tmp_path, script)[0] == "yes"


@pytest.mark.parametrize("operator", ["+-", "*/", "''"])
def test_expr_has_operators_of_one_character(tmp_path: Path, operator: str) -> None:
    assert given(tmp_path, f"X=$(expr 3 {operator} 4)")[0] is None


@pytest.mark.parametrize(
    "text",
    [
        f"A={'a' * 4000}; B=${{A//*a*a*a*a*a*a*a*a*a*b/x}}; C=${{#B}}",
        f"A={'a' * 4000}; B=${{A//b/x}}; C=${{#B}}",
        f"A={'a' * 4000}; C=4000; case $A in *a*a*a*a*a*a*a*a*a*a*b) C=1;; esac",
        f"A={'a' * 40}; C=4000; if [[ $A =~ ^(a+)+b$ ]]; then C=1; fi",
        f"A={'a' * 4000}; C=4000; if [[ $A =~ a*a*a*a*a*a*b ]]; then C=1; fi",
    ],
)
@pytest.mark.timeout(20)
def test_patterns_take_no_exponential_time(tmp_path: Path, text: str) -> None:
    assert given(tmp_path, f"{text}\nX=$C")[0] in ("4000", None)
