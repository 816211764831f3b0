"""Bash scripts drawn at random, and what bash itself makes of them in an empty environment."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from hypothesis import strategies as st

from tests.model.shell.blocks import KINDS, block

NAMES = ("A", "B", "C_1", "UNSET")
GIVEN = ("U", "V")
"""Variables of the environment that no statement sets and that have no default: ours knows nothing
of their values."""
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
        f"$(echo {inner} ${name} $U)",
        f'$(echo "${name}" {inner})',
        f"$(echo {inner}; echo ${name})",
        f"$(echo -n ${name}; echo $U {inner} | cat)",
        f"$(cat <<EOF\n{inner} ${name}\n$U\nEOF\n)",
        f'$(f2() {{ echo {inner}; [ -n "${name}" ] && echo z; }}; f2)',
        f"${{{name}//'a'/z}}",
        f'${{{name}//"b c"/z}}',
        f"${{{name}//$B/z}}",
        f"${{{name}##*'/'}}",
        f"${{{name}%%\"$A\"*}}",
        "${!P}",
        "${!R[@]}",
    )[form]


defaults = st.one_of(
    st.just(""),
    bare,
    plain.map(lambda text: f'"{text}"'),
    plain.map(lambda text: f"'{text}'"),
    names.map(lambda name: f"${name}"),
    st.sampled_from(["$U", "$U$A", "'a '$U", '$U"$A"', '"$U"']),
    st.tuples(names, bare).map(lambda pair: f'"{pair[1]} ${pair[0]}  z"'),
)
expansions = st.builds(_expansion, names, defaults, st.integers(0, 32))
array_forms = st.tuples(
    arrays,
    st.sampled_from(["[@]", "[*]", "[0]", "[1]", "[-1]", "[@]:1", "[@]:0:2", "[@]/a/z", "[@]%b"]),
).map(lambda pair: f"${{{pair[0]}{pair[1]}}}")
counts = st.one_of(
    arrays.map(lambda name: f"${{#{name}[@]}}"),
    st.sampled_from(["$#", "$*", "$@", "${2:-q}", "$1", "${@:-}"]),
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
    st.builds('[ {} "{}" ]'.format, st.sampled_from(["-z", "-n", "! -z"]), expansions),
    st.sampled_from(['[ -n "$U" ]', '[ "$U" = x ]', '[[ $U == x* ]]', '[ -z "$U$A" ]']),
    st.builds("[[ -z ${} || ! -n ${} && 1 -lt 2 ]]".format, names, names),
    st.builds("(( {} > 3 ))".format, names),
    st.sampled_from(["true", "false", "! true", "[ $# -gt 0 ]"]),
)


simple = st.one_of(
    st.builds("{}={}".format, names, parts),
    st.builds('{}="{} {}"'.format, names, bare, any_form),
    st.builds('{0}="${0} {1}"'.format, names, st.sampled_from(FLAGS)),
    st.builds("{}+={}".format, names, parts),
    st.builds("{}+=b".format, names),
    st.builds("{0}=x$(echo a ${1}); {0}+={2}".format, names, st.sampled_from((*NAMES, "U")), parts),
    st.builds("{}=${{{}[*]}}".format, names, arrays),
    st.builds('{}="${{{}[*]}}"{}'.format, names, arrays, st.sampled_from(["", "b", "$U"])),
    st.builds("{}=($(echo {} $U))".format, arrays, parts),
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
    st.builds(
        "IFS={} read -ra {} <<< {}".format,
        st.sampled_from([",", "' '", ":,"]),
        arrays,
        st.sampled_from(["'a,b c'", '"$A"', "a:,b"]),
    ),
    st.builds("IFS=, read {} B <<< {}".format, names, st.sampled_from(["'a,b,c'", '"$A,x"', "a"])),
    st.builds("set -- {} {}".format, words, words),
    st.builds("set -- $U {}".format, words),
    st.builds('eval "{}=\\"${{{}}}b\\""'.format, names, names),
    st.builds("eval {}=$U".format, names),
    st.builds("P={}".format, st.sampled_from([*NAMES, "R[1]", "R[@]"])),
    st.builds("declare -i {0}; {0}={1}".format, names, st.sampled_from(["3+4", "12", "$U", "A"])),
    st.builds("declare {1} {0}; {0}={2}".format, names, st.sampled_from(["-u", "-l", "-x"]), parts),
    st.builds("mapfile -t {} <<< {}".format, arrays, st.sampled_from(["'a b'", "$'a\\nb'", "$A"])),
    st.builds("mapfile -t {} < <(echo {})".format, arrays, parts),
    st.builds("(( {} = 1, {} = A + U ))".format, names, names),
    st.builds("(( U && ({} = 2) )) || {}+=c".format, names, names),
    st.builds("[[ ${} =~ ^([a-c]+)(.*)$ ]] && {}=${{BASH_REMATCH[1]}}".format, names, names),
    st.builds("cat <<E >/dev/null && {}={}\nx\nE".format, names, parts),
    st.builds("cat > e.sh <<E\n{}={}\nE\n. ./e.sh".format, names, bare),
    st.builds("shift {}".format, st.sampled_from(["5", "$((0 - 1))", "$U"])),
    st.builds("printf 'a b\\n' | read {}".format, names),
    st.builds("declare -A T=([x]={} [y]=2); {}=${{T[x]}}".format, bare, names),
    st.builds("export -n {}".format, names),
    st.sampled_from(["shift", "set -e", "trap 'A=9' ERR", "trap 'B=q' EXIT", "set -a", ""]),
    st.sampled_from(["cat <<EOF >/dev/null\n--junk $A\nEOF", "# it's"]),
)
statements = st.recursive(
    simple,
    lambda inner: st.builds(
        block,
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
        "touching": f'X=$(echo {bare_words} $U)\ntorchrun pretrain_gpt.py --a x$X"${{R[@]}}"b $@b',
        "bash": 'bash -c "torchrun pretrain_gpt.py --a ${R[*]} $A"',
        "child": f"export A; bash -c 'torchrun pretrain_gpt.py --a $A ${{B:-d}} ${{C_1-e}}' {tail}",
        "prefixed": f"B={given[0]} bash -c 'torchrun pretrain_gpt.py --a $A ${{B:-d}} $1' x {tail}",
        "input": f"bash -s {tail} <<E\ntorchrun pretrain_gpt.py --a $A \\$1 \\$#\nE",
        "piped": "cat <<E | bash\ntorchrun pretrain_gpt.py --a $A ${B:-x}\nE",
        "function of a child": f'r() {{ torchrun pretrain_gpt.py --a "$@" $A; }}\nexport -f r\n'
        f"bash -c 'r $0 \"$@\"' {tail}",
        "module": f"srun torchrun -m megatron.training.pretrain_gpt --a {tail}",
    }[kind]


LAUNCHES = ["plain", "redirected", "eval", "logged", "function", "bash", "module", "touching",
            "child", "prefixed", "input", "piped", "function of a child"]  # fmt: skip
scripts = st.builds(
    lambda body, launch: "\n".join([*body, launch]),
    st.lists(statements, min_size=1, max_size=6),
    st.builds(_launch, st.sampled_from(LAUNCHES), st.lists(words, min_size=1, max_size=3)),
)
environments = st.dictionaries(
    st.sampled_from(GIVEN),
    st.sampled_from(["", "x", "x y", "-n", "--f", " a", "a ", "1", ",", "a,b"]),
)


def by_bash(
    script: str, folder: Path, given: Mapping[str, str] | None = None
) -> list[list[str]] | None:
    """Return the arguments of each start of `torchrun`; None where bash fails, prints more, or does
    not end.

    Bash leaves a statement whose arithmetic meets a text that is no number, or `${!X}` a text that
    is no name: what is not known is taken for a number or a name here.

    Args:
        given: variables of the environment, which ours knows nothing of.
    """
    command = ["/bin/bash", "--noprofile", "--norc", "-c", _STUB + script, "train.sh"]
    environment = {"PATH": "/usr/bin:/bin", **(given or {})}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            cwd=folder,
            timeout=5,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return None  # a loop without an end
    if b"(error token is" in done.stderr or b"invalid indirect expansion" in done.stderr:
        return None
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
