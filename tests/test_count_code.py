"""Lines, literals and switches are counted as the page of the tool says."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.count_code import code_lines, count, literals, switches

SOURCE = '''\
"""A docstring
of two lines."""

# A comment.
LIMIT = 64
"""What the limit is for."""


def f(problem, share=0.5):  # behind code
    """A docstring."""
    text = """two
lines"""
    if problem.num_gpus > LIMIT or len(problem.nodes) > 16 or problem.num_gpus > 1:
        return -1, True
    return text, 2, problem.num_gpus == share
'''


def test_docstrings_and_comments_are_no_code() -> None:
    tree = ast.parse(SOURCE)
    assert code_lines(SOURCE, tree) == {5, 9, 11, 12, 13, 14, 15}
    assert list(literals(tree)) == [64, 0.5, 16]
    assert sorted(text for _, text in switches(tree)) == [
        "len(problem.nodes) > 16",
        "problem.num_gpus > LIMIT",
    ]


def test_a_folder_is_counted_with_all_below_it(tmp_path: Path) -> None:
    (tmp_path / "planner" / "moves").mkdir(parents=True)
    for name in ("planner/one.py", "planner/moves/two.py"):
        (tmp_path / name).write_text(SOURCE)
    found = count(tmp_path, "planner")
    assert (found.num_files, found.num_lines, found.num_literals) == (2, 14, 6)
    assert [place for place, _ in found.switches] == ["planner/moves/two.py:13"] * 2 + [
        "planner/one.py:13"
    ] * 2
