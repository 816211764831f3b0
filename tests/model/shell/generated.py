"""Bash scripts drawn at random, and what bash itself makes of them in an empty environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hypothesis import strategies as st

NAMES = ("A", "B", "C_1", "UNSET")
ARRAYS = ("R", "S")
FLAGS = ("--num-layers", "--bf16", "--lr", "--x-y")
_STUB = 'torchrun() { printf "%s\\0" "$#" "$@"; }\nsrun() { "$@"; }\nexport -f torchrun srun\n'

names = st.sampled_from(NAMES)
arrays = st.sampled_from(ARRAYS)
plain = st.sampled_from(["a", "b c", "12", "0", "", "x*y", "a/b.c", "-1", "1e-4", "--f 1", "é"])
bare = st.sampled_from(["a", "12", "0", "x_y", "a/b.c", "-1", "1e-4", r"a\ b", "b=c", "x\\\ny"])


def _expansion(name: str, inner: str, form: int) -> str:
    return (
        f"${name}",
        f"${{{name}}}",
        f"${{{name}:-{inner}}}",
        f"${{{name}-{inner}}}",
        f"${{{name}:={inner}}}",
        f"${{{name}:+{inner}}}",
        f"${{{name}+{inner}}}",
        f"${{#{name}}}",
        f"${{{name}%b*}}",
        f"${{{name}##*a}}",
        f"${{{name}/a/z}}",
        f"${{{name}//[0-9]/n}}",
        f"${{{name}:1:2}}",
        f"${{{name}^^}}",
        f"$(echo {inner})",
        f"$(({name} + 1))",
        f"$(( ${{{name}:-3}} > 2 ? 7 : 2 * 4 ))",
        f"`echo ${name}`",
        f'$(basename "${name}")',
        f'$(printf "%s-%d" {inner} 3)',
    )[form]


defaults = st.one_of(
    bare,
    plain.map(lambda text: f'"{text}"'),
    plain.map(lambda text: f"'{text}'"),
    names.map(lambda name: f"${name}"),
    st.tuples(names, bare).map(lambda pair: f'"{pair[1]} ${pair[0]}  z"'),
)
expansions = st.builds(_expansion, names, defaults, st.integers(0, 19))
array_forms = st.tuples(
    arrays, st.sampled_from(["[@]", "[*]", "[0]", "[1]", "[-1]", "[@]:1", "[@]:0:2"])
).map(lambda pair: f"${{{pair[0]}{pair[1]}}}")
counts = st.one_of(
    arrays.map(lambda name: f"${{#{name}[@]}}"),
    st.sampled_from(["$#", "$*", "$@", "${2:-q}", "$1"]),
)
any_form = st.one_of(expansions, array_forms, counts)
parts = st.one_of(
    bare,
    plain.map(lambda text: f"'{text}'"),
    plain.map(lambda text: f'"{text}"'),
    any_form,
    any_form.map(lambda form: f'"{form}"'),
    st.tuples(bare, any_form, bare).map(lambda three: f'"{" ".join(three)}"'),
    st.sampled_from(["$'a\\tb'", "{1..3}", "{a,b}c", '""', "~x"]),
)
words = st.lists(parts, min_size=1, max_size=3).map("".join)
flags = st.one_of(
    st.sampled_from(FLAGS), st.tuples(st.sampled_from(FLAGS), words).map(lambda p: f"{p[0]} {p[1]}")
)
conditions = st.one_of(
    st.builds(
        lambda left, operator, right: f'[ "{left}" {operator} "{right}" ]',
        expansions,
        st.sampled_from(["=", "!=", "-eq", "-gt", "=="]),
        st.sampled_from(["a", "12", "0", ""]),
    ),
    st.builds(
        lambda left, operator, right: f"[[ {left} {operator} {right} ]]",
        any_form,
        st.sampled_from(["==", "!=", "-eq", "-lt", "=~"]),
        st.sampled_from(["a*", "12", "0", "[a-c]*", "'b c'", "^a", "$A"]),
    ),
    st.builds("[ {} ${} ]".format, st.sampled_from(["-z", "-n", "! -z"]), names),
    st.builds("[[ -z ${} || ! -n ${} && 1 -lt 2 ]]".format, names, names),
    st.builds("(( {} > 3 ))".format, names),
    st.sampled_from(["true", "false", "! true", "[ $# -gt 0 ]"]),
)


def _block(kind: str, condition: str, name: str, body: str, other: str) -> str:
    return {
        "if": f"if {condition}; then\n{body}\nelse\n{other}\nfi",
        "elif": f'if {condition}; then\n{body}\nelif [ -n "${name}" ]; then\n{other}\nfi',
        "and": f"{condition} && {{ {body}\n}}",
        "or": f"{condition} || {{ {body}\n}}",
        "case": f'case "${name}" in\n a|12) {body} ;;\n b*|"")\n{other}\n;;\n *) : ;;\nesac',
        "for": f"for {name} in 1 'b c' ${name}; do\n{body}\ndone",
        "c": f"for ((i = 0; i < 3; i++)); do\n{body}\nR+=($i)\ndone",
        "while": f"n=0\nwhile [ $n -lt 2 ]; do\n{body}\nn=$((n + 1))\ndone",
        "function": f"f() {{\nlocal {name}=l\n{body}\n}}\nf 'x y' ${name}\n{other}",
        "return": f"g() {{\nif {condition}; then return; fi\n{body}\n}}\ng q",
        "subshell": f"( {body} )\n{other}",
        "group": f"{{ {body}\n}} > /dev/null",
        "continue": f"for i in 1 2 3; do if {condition}; then continue; fi\n{body}\ndone",
    }[kind]


KINDS = [
    "if",
    "elif",
    "and",
    "or",
    "case",
    "for",
    "c",
    "while",
    "function",
    "return",
    "subshell",
    "group",
    "continue",
]
simple = st.one_of(
    st.builds("{}={}".format, names, parts),
    st.builds('{}="{} {}"'.format, names, bare, any_form),
    st.builds('{0}="${0} {1}"'.format, names, st.sampled_from(FLAGS)),
    st.builds("{}+={}".format, names, parts),
    st.builds("export {}={}".format, names, parts),
    st.builds("{}={} {}={}".format, names, parts, names, bare),
    st.builds("{}=({} {})".format, arrays, flags, words),
    st.builds("{}=( # a comment\n {} \\\n {}\n)".format, arrays, flags, words),
    st.builds("{}+=({})".format, arrays, flags),
    st.builds("{}[1]={}".format, arrays, parts),
    st.builds('printf -v {} "%s," "${{{}[@]}}"'.format, names, arrays),
    st.builds("unset {}".format, names),
    st.builds(": ${{{}:={}}}".format, names, defaults),
    st.builds("(( {} = 2 * 3 ))".format, names),
    st.builds('eval "{}={}"'.format, names, bare),
    st.builds("read {} C_1 <<< {}".format, names, st.sampled_from(["'a b'", '"$A"', "x"])),
    st.builds("set -- {} {}".format, words, words),
    st.sampled_from(["shift", "set -e", "cat <<EOF >/dev/null\n--junk $A\nEOF", "# it's", ""]),
)
statements = st.recursive(
    simple,
    lambda inner: st.builds(
        _block,
        st.sampled_from(KINDS),
        conditions,
        names,
        st.lists(inner, min_size=1, max_size=2).map("\n".join),
        inner.map(lambda text: text or ":"),
    ),
    max_leaves=4,
)


def _launch(kind: str, given: list[str]) -> str:
    tail = " ".join(given)
    bare_words = " ".join(word for word in given if '"' not in word)
    return {
        "plain": f"torchrun pretrain_gpt.py --a {tail}",
        "redirected": f"torchrun pretrain_gpt.py --a {tail} 2>&1 | cat",
        "eval": f'X="torchrun pretrain_gpt.py --a {bare_words}"\neval $X',
        "logged": 'X="torchrun pretrain_gpt.py --a $A"\nX="$X |& cat"\neval "$X"',
        "function": f'run() {{ torchrun pretrain_gpt.py --a "$@" $1; }}\nrun {tail}',
        "bash": 'bash -c "torchrun pretrain_gpt.py --a ${R[*]} $A"',
        "module": f"srun torchrun -m megatron.training.pretrain_gpt --a {tail}",
    }[kind]


LAUNCHES = ["plain", "redirected", "eval", "logged", "function", "bash", "module"]
scripts = st.builds(
    lambda body, launch: "\n".join([*body, launch]),
    st.lists(statements, min_size=1, max_size=6),
    st.builds(_launch, st.sampled_from(LAUNCHES), st.lists(words, min_size=1, max_size=3)),
)


def by_bash(script: str, folder: Path) -> list[list[str]] | None:
    """Return the arguments of each start of `torchrun`; None where bash fails or prints more."""
    command = ["env", "-i", "/bin/bash", "--noprofile", "--norc", "-c", _STUB + script, "train.sh"]
    path = "PATH=/usr/bin:/bin"
    done = subprocess.run(
        [*command[:2], path, *command[2:]],
        capture_output=True,
        cwd=folder,
        timeout=20,
        stdin=subprocess.DEVNULL,
    )
    fields = done.stdout.decode(errors="surrogateescape").split("\0")
    starts: list[list[str]] = []
    position = 0
    while position < len(fields) - 1:
        if not fields[position].isdecimal():
            return None
        count = int(fields[position])
        starts.append(fields[position + 1 : position + 1 + count])
        position += 1 + count
    return starts if fields[-1] == "" else None
