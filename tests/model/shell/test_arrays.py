"""Arrays and values known in part: their counts, lengths and parts, beside what bash makes of
them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_hetero.model.script import read_script
from tests.model.shell.generated import by_bash
from tests.model.shell.test_against_bash import is_covered

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
PART = 'X="b c$U"\n'
BRANCH = 'X=\nif [ "$U" = 1 ]; then X="--f 1 $V"; fi\n'
COUNTS = {
    "an element known in part": (
        "R=(--num-layers 'b c'${#R[@]})", "${#R[@]}", "?"),
    "the elements of it": (
        "R=(--num-layers 'b c'${#R[@]})", '${R[0]} ${R[1]} "${R[1]}"', "--num-layers|?|?"),
    "in quotes": ('R=(a "b c $U")', '"${#R[@]}" ${R[0]}', "?|a"),
    "never set": ("", "${#R[@]} ${#R} ${#R[0]}", "?|?|?"),
    "unset": ("unset R", "${#R[@]} ${#R} ${#R[0]}", "0|0|0"),
    "of nothing": ("unset S\nR=(${S[@]} \"${S[@]}\")", '${#R[@]} "${R[@]}"', "0"),
    "a count in an array": ("unset S\nR=(a 'b c'${#S[@]})", '${#R[@]} "${R[1]}"', "2|b c0"),
    "nested": (
        'S=(${#R[@]})\nR=(a "b $S" ${#S[@]})', "${#R[@]} ${R[2]} ${#R[1]}", "?|?|?"),
    "twice nested": (
        'R=(a b "${S[@]}" ${#S[@]})\nS=("${R[@]}" ${#R[@]})', "${#S[@]} x", "?|x"),
    "in a sum": ('R=(a "x y$U")', "$((${#R[@]} * 2)) $(( ${#R[@]} + 1 ))", "?|?"),
    "more elements": ('R=(a)\nR+=("x y ${#S[@]}" "$(expr 1 + 1)")', "${#R[@]}", "?"),
    "in a loop": ('R=("b c$U" d)\nfor x in "${R[@]}"; do Q+=(${#x}); done', "${Q[@]}", "?|1"),
    "of a table": ('declare -A T\nT[a]="x y$U"', "${#T[@]} ${#T[a]} ${T[b]}z", "1|?|z"),
    "of keys": ('R=(1 2 3)\nset -- "${!R[@]}"', "$# z", "?|z"),
    "a loop over keys": (
        'R=(7 8)\nN=0\nfor k in "${!R[@]}"; do N=$((N + 1)); done', "$N", "?"),
    "of files": ("R=(/bin/b*)", "${#R[@]}", "?"),
    "of braces": ('N=0\nfor f in a{b,"c"}; do N=$((N + 1)); done', "$N", "?"),
    "of arguments": ('set -- "b c$U" d', "$# ${#1} ${#2}", "2|?|1"),
    "of a part of an array": ('R=(1 2 "$U")\nset -- "${R[@]:1}"', "$# z", "?|z"),
}  # fmt: skip
PARTS = {
    "a length": (PART, "${#X}", "?"),
    "cut behind": (PART, "${X%b*} ${X#b} d", "?|?|d"),
    "replaced": (PART, "${X/b/z} d", "?|d"),
    "a part": (PART, "${X:1:2}", "?"),
    "another case": (PART, "${X^^} d", "?|d"),
    "another case, of elements": ('R=(--x "b c$U")', "${R[@]^^}", "--X|?"),
    "a key": ("declare -A T=([b]=1)\n" + PART, "${T[$X]} d", "?|d"),
    "a number": (PART + "printf -v Y '%d' \"$X\" 2>/dev/null", "$Y", "?"),
    "a width": (PART + "printf -v Y 'x%8s' \"$X\"", "$Y", "?"),
    "a first word that may be two": ('R=($U"b c" d)', "$R ${R%c} ${#R}", "?|?|?"),
    "shifted": ('set -- $U"b c" d\nshift', "$@", "?|d"),
}  # fmt: skip
DEFAULTS = {
    "a branch that adds words": (BRANCH, "${X:+y} z", "?|z"),
    "a branch that sets": ('unset X\nif [ "$U" = 1 ]; then X=3; fi', "${X+y} z", "?|z"),
    "more in a branch": (
        'X=x\nif [ "$U" = 1 ]; then X="x --f"; fi', "${X+y} ${X:+d}", "y|d"),
    "no element": ("R=()", "${R+y} ${R-d} ${R[@]+z} ${R[@]-w}", "d|w"),
    "perhaps no element": ("R=($U)", "${R[@]+y} z", "?|z"),
    "an element beyond": ("R=(1)", "${R[5]+y} ${R[5]-d} ${R[0]+z}", "?|?|z"),
    "empty elements": ('R=("" "")', "${R[@]:-d} ${R[@]:+e} ${R[@]-x} z", "?|?|z"),
    "whether it is empty": (
        BRANCH + 'if [ -n "$X" ]; then A=1; else A=2; fi', "$A", "?"),
}  # fmt: skip
FIRST = {
    "a sum": ("R=(1 2)\n(( R = 5 ))", "${R[@]}", "5|2"),
    "a loop": ("R=(a b)\nfor R in 1 2; do :; done", "${R[@]}", "2|b"),
    "printf": ("R=(a b)\nprintf -v R q", "${R[@]}", "q|b"),
    "more of it": ("R=(a b)\nR=x\nR+=y", "${#R[@]} ${R[@]}", "2|xy|b"),
    "perhaps another one": ("R=($U x)\nR=y", "${R[@]} z", "?|z"),
    "of a table": ("declare -A T=([a]=5)\nT=x", "${#T[@]} ${T[0]}", "?|?"),
    "of a table, in a sum": ("declare -A T=([a]=5)", "$((T + 1))", "1"),
    "a local variable hides it": (
        "R=(a b)\nf() { local R=x${R[1]}; A=${#R[@]}$R; }\nf", "$A ${R[@]}", "1xb|a|b"),
}  # fmt: skip
EDGES = {
    "printed behind text": ('B="$U --x y"', "a$(echo $B)", "?|?|y"),
    "printed before text": ('B="--x y $U"', "$(echo $B)b", "--x|?|?"),
    "printed alone": ('B="$U --x $U"', "$(echo $B) a $(echo $B)", "?|--x|?|a|?|--x|?"),
    "elements": ("R=($U x y)", "a${R[@]} ${R[@]}", "?|?|y|?|x|y"),
    "elements in quotes": ("R=(y x $U)", '"${R[@]}"c', "y|?|?"),
    "arguments": ("set -- $U x y", 'a$@ "a$@"', "?|?|y|?|?|y"),
    "a blank between": ('R=($U x)\nX="a ${R[*]} b"', "$X", "a|?|x|b"),
    "no blank between": ('R=($U x y)\nX="a${R[*]}"', "$X", "?|?|y"),
    "a branch": ('X=y\nif [ "$U" = 1 ]; then X="--f y"; fi', "a$X", "?|?"),
    "a branch, and more": (
        'X=y\nif [ "$U" = 1 ]; then X="--f y"; fi\nX="$X --lr 3"', "$X", "?|y|--lr|3"),
    "a branch, joined": (
        'if [ "$U" = 1 ]; then R=(--x "a $U b"); fi\nX="${R[*]}"', "$X z", "?|?|?|?|z"),
    "added": ('X=a\nB="$U --lr"\nX+=$(echo $B)', "$X", "?|?"),
}  # fmt: skip


def _check(folder: Path, before: str, given: str, words: str) -> None:
    script = f"{before}\ntorchrun pretrain_gpt.py --a {given}"
    read = read_script(folder / "train.sh", script)
    assert "|".join(w.text or "" if w.is_known else "?" for w in read.words[1:]) == words
    started = by_bash(script, folder)
    assert started and not read.unread
    assert is_covered(read, started[-1][1:])


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_elements(tmp_path: Path, name: str) -> None:
    _check(tmp_path, *COUNTS[name])


@pytest.mark.parametrize("name", PARTS)
def test_what_depends_on_a_value_known_in_part(tmp_path: Path, name: str) -> None:
    _check(tmp_path, *PARTS[name])


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_for_what_may_be_empty_or_not_set(tmp_path: Path, name: str) -> None:
    _check(tmp_path, *DEFAULTS[name])


@pytest.mark.parametrize("name", FIRST)
def test_first_element_of_an_array(tmp_path: Path, name: str) -> None:
    _check(tmp_path, *FIRST[name])


@pytest.mark.parametrize("name", EDGES)
def test_text_beside_what_may_be_no_word(tmp_path: Path, name: str) -> None:
    _check(tmp_path, *EDGES[name])
