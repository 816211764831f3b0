"""Words beside blanks that may not be there, and fields at other separators, beside bash's words in
several environments."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_hetero.model.script import read_script
from tests.model.shell.generated import by_bash
from tests.model.shell.test_against_bash import is_covered

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
ENVIRONMENTS: list[dict[str, str]] = [
    {}, {"U": "x"}, {"U": "-n"}, {"U": "x y", "V": "q"}, {"V": "q"}, {"U": " "},
]  # fmt: skip
UNDER_IF = 'if [ -n "$U" ]; then {}; fi\n'
TOUCHING = {
    "added": ("X=$(echo a $U); X+=b", "$X", "?|?"),
    "added after a blank": ("X=$(echo a $U); X+=' b'", "$X", "a|?|b"),
    "added before": ("X=$(echo $U a); X=b$X", "$X", "?|?"),
    "nothing added": ("X=$(echo a $U)", "$X", "a|?"),
    "two that may be none": ("X=$(echo a $U$V)", "${X}b", "?|?"),
    "another unknown": ("X=$(echo a $U)", "$X$V", "?|?"),
    "a line that may be empty": ("X=$(echo a; echo $U)", "${X}b", "?|?"),
    "lines": ("X=$(echo $U; echo)", "${X}b", "?"),
    "an array": ('R=(a $U)\nX="${R[*]}b"', "$X", "?|?"),
    "an array in between": ('R=(a $U c)\nX="${R[*]}b"', "$X", "a|?|cb"),
    "through a pipe": ("X=$(echo a $U | cat)", "${X}b", "?|?"),
    "a here-document": ("X=$(cat <<EOF\na\n$U\nEOF\n)", "${X}b", "?|?"),
    "in code": ("f() { D=$1; }\nA=(a $U)\neval \"f ${A[*]}b c\"", "$D", "?"),
    "arguments": ("A=(a $U)\nf() { D=$1; }\nf ${A[@]}b", "$D z", "?|z"),
    "a branch": ("X=a\n" + UNDER_IF.format('X="$X --f"') + "X+=b", "$X", "?|?"),
    "a branch before": ("X=a\n" + UNDER_IF.format('X="--f $X"'), "b$X", "?|?"),
    "a blank in a branch": ("X=a\n" + UNDER_IF.format("X='a '"), "${X}b", "?"),
    "branches that touch": (
        'X=a\nif [ "$U" ]; then X="a --f"; elif [ "$V" ]; then X=ab; else X="a "; fi',
        "$X", "?|?|?"),
    "a blank of an array": (
        "R=()\n" + UNDER_IF.format("R=(--x ' ')"), '"${R[@]}"', "?|?"),
    "a pattern": (
        "X=$(echo a $U); case ${X}b in a) Y=1;; ab) Y=2;; *) Y=3;; esac", "$Y", "?"),
}  # fmt: skip
PRINTED = {
    "perhaps an option": ("X=$(echo $U -n a)", "$X z", "?|?|a|z"),
    "perhaps an option in quotes": ('X=$(echo "$U" a)', "b$X", "?|?"),
    "perhaps escapes": ("X=$(echo $U 'a\\tb')", "$X", "?"),
    "lines that may be one": ("X=$(echo $U a; echo c)", "$X", "?|?"),
    "quotes in a here-document": (
        'X=$(cat <<EOF\n"b \\"x\\" \\$U"\nEOF\n)', "$X", '"b|\\"x\\"|$U"'),
    "quotes of an expansion": ('X=$(cat <<EOF\n"b ${V:-"c d"}\nEOF\n)', "$X", "?"),
}  # fmt: skip
SEPARATED = {
    "not known": ("IFS=$U\nX='a b'", "$X", "?"),
    "marks": ("IFS=,\nX='a,,b'", "$X", "a||b"),
    "marks at the ends": ("IFS=,\nX=',a,'", "$X", "|a"),
    "marks and blanks": ("IFS=' ,'\nX='a , b  c'", "$X", "a|b|c"),
    "none": ("IFS=\nX='a b'", "$X", "a b"),
    "for a command": ("IFS=, read -ra A <<< 'a,b c'", '"${A[@]}"', "a|b c"),
    "for two names": ("IFS=: read A B <<< 'a:b'", "$A $B", "a|b"),
    "the last name gets the rest": ("IFS=: read A B <<< 'a:b:c'", "$A $B z", "?|?|z"),
    "joined by it": (
        'IFS=,\nR=(1 2)\nX=${R[*]}\nY="${R[*]}"\nZ=${R[@]}\nunset IFS', "$X $Y $Z", "1,2|1,2|1|2"),
    "local": ("f() { local IFS=,; X=\"$*\"; }\nf 1 2\nY='a b'", "$X $Y", "1,2|a|b"),
    "in a loop": (
        "while IFS=, read -r k v; do N=$k; done <<< \"$U\"\nX='a b'", "$X", "a|b"),
}  # fmt: skip
FORMS = {
    "break of two loops": (
        "A=0\nfor i in 1 2; do for j in 1 2; do break 2; done; A=$A$i; done", "$A", "0"),
    "continue of two loops": (
        "A=; for i in 1 2; do for j in 1 2; do [ $j = 2 ] && continue 2; A+=$i; done; A+=z; done",
        "$A", "12"),
    "break of more loops than there are": (
        "for i in 1 2; do break 5; done\nA=1\nbreak\nA+=2", "$A", "12"),
    "an empty word": ('unset A', '"${A+x}" "${A:+x}" "${R[@]+x}" z', "||z"),
    "lines that the grammar joins": ("A=1 B=2\nexport C='a b'\nA=1 B=2\nunset A", "$A $C", "a|b"),
    "a default that is assigned": ("unset A", "${A:=a\\ b} ${B:-c\\ d}", "a|b|c d"),
    "unset as a word": ("A=1\ncommand unset A\nbuiltin export B=2", "$A $B", "2"),
}  # fmt: skip
CONTINUED = {
    "a value": ("A=x\\\ny", "$A", "xy"),
    "a value, then one that is added": ("A+=x\\\nUNSET+=b", "$A", "xUNSET+=b"),
    "a value and the next line": ("A=x\\\ny\nA+=b\nB+=$A", "$A $B", "xyb|xyb"),
    "a value twice": ("A='a b'\\\n\"c\"\\\n\\\nd B=${A}\\\n2", '"$A" "$B"', "a bcd|a bcd2"),
    "a value before a command": ("A=x\\\ny f\nB=${A-none}", "$B", "none"),
    "an element": ("R=(1)\nR[0]=x\\\ny\nR+=(a\\\nb c)", '"${R[@]}"', "xy|ab|c"),
    "a name": ("AB\\\nC=x\nexpo\\\nrt B=1\\\n2", "$ABC $B", "x|12"),
    "a declaration": ("export A=x\\\ny B=z\nunset B\\\nC", "$A $B", "xy|z"),
    "a word of a loop": ("for i in a\\\nb c; do A+=$i,; done", "$A", "ab,c,"),
    "a tested word": ("if [ a\\\nb = ab ]; then A=2; fi", "$A", "2"),
    "a mark": ("A=x\\\n#y", "$A", "x#y"),
    "no word": ("A=1 \\\nB=2 # C=\\\nC='3\\\n4'", '$A $B "$C"', "1|2|3\\\n4"),
    "inside of another": ("A=$(echo a\\\nb)\\\nc$(echo d\\\ne)", "$A", "abcde"),
    "text for cat": ("A=$(cat <<EOF\n$A x\\\n$B y\nEOF\n)\nB=b\\\nc", "$A $B", "x|y|bc"),
}  # fmt: skip


def _check(folder: Path, before: str, given: str, words: str) -> None:
    script = f"{before}\ntorchrun pretrain_gpt.py --a {given}"
    read = read_script(folder / "train.sh", script)
    assert "|".join(w.text or "" if w.is_known else "?" for w in read.words[1:]) == words
    assert not read.unread
    for environment in ENVIRONMENTS:
        started = by_bash(script, folder, environment)
        assert started and is_covered(read, started[-1][1:]), environment


@pytest.mark.parametrize("name", TOUCHING)
def test_text_that_may_touch(tmp_path: Path, name: str) -> None:
    _check(tmp_path, *TOUCHING[name])


@pytest.mark.parametrize("name", PRINTED)
def test_what_echo_and_cat_print(tmp_path: Path, name: str) -> None:
    _check(tmp_path, *PRINTED[name])


@pytest.mark.parametrize("name", SEPARATED)
def test_separators(tmp_path: Path, name: str) -> None:
    _check(tmp_path, *SEPARATED[name])


@pytest.mark.parametrize("name", CONTINUED)
def test_words_that_go_on_in_the_next_line(tmp_path: Path, name: str) -> None:
    before, given, words = CONTINUED[name]
    _check(tmp_path, f"unset A B C R\nf() {{ :; }}\n{before}", given, words)


@pytest.mark.parametrize("name", FORMS)
def test_forms(tmp_path: Path, name: str) -> None:
    _check(tmp_path, *FORMS[name])
