"""The applier against `difflib`'s diffs: exact there and back, and nothing at all otherwise."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import FileFormatError
from megatron_hetero.patching.unified_diff import apply_hunks, hunks_of

LINES = st.lists(st.sampled_from(["a\n", "b\n", "c c\n", "\n", "- d\n", "+ e\n"]), max_size=25)


def diff_of(before: list[str], after: list[str], context: int) -> str:
    return "".join(difflib.unified_diff(before, after, "a/x", "b/x", n=context))


@given(before=LINES, after=LINES, context=st.integers(1, 4))
def test_there_and_back(before: list[str], after: list[str], context: int) -> None:
    # An insertion into an empty file has line number 0, which no file of ours has.
    if not before or not after or before == after:
        return
    hunks = hunks_of(diff_of(before, after, context), "x.patch")
    assert apply_hunks("".join(before), hunks, "x") == "".join(after)
    back = tuple(hunk.reversed for hunk in hunks)
    assert apply_hunks("".join(after), back, "x") == "".join(before)


def test_another_text_is_refused_with_its_line() -> None:
    hunks = hunks_of(diff_of(["a\n", "b\n"], ["a\n", "c\n"], 3), "x.patch")
    with pytest.raises(FileFormatError, match=r"x: line 1 is not what the patch expects"):
        apply_hunks("a\nB\n", hunks, "x")


@pytest.mark.parametrize(
    ("diff", "words"),
    [
        ("", "without a hunk"),
        ("hello\n", "not a line of a unified diff: 'hello'"),
        ("@@ -1,2 +1,2 @@\n a\n", "the hunk of line 1 ends early"),
    ],
)
def test_what_is_no_diff_is_refused(diff: str, words: str) -> None:
    with pytest.raises(FileFormatError, match=words):
        hunks_of(diff, "x.patch")
