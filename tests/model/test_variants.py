"""Variants of the forms in which people keep flags: the words that bash gives, written by hand."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron_hetero.model.script import read_script

RUN = "torchrun pretrain_gpt.py"
SOURCED = {
    "an array": ("A=(--a 1 --b 'x y')", f'source ./more.sh\n{RUN} "${{A[@]}}"', "--a|1|--b|x y"),
    "by the script's own folder": (
        "A='--a 1'", f'. "$(dirname "$0")/more.sh"\n{RUN} $A', "--a|1"),
    "by BASH_SOURCE": (
        "A=(--a)\nA+=(2)",
        f'HERE="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"\nsource "$HERE/more.sh"\n'
        f'{RUN} "${{A[@]}}"',
        "--a|2"),
    "a function": ('go() { torchrun pretrain_gpt.py "$@" --b 3; }',
                   "source ./more.sh\ngo --a 1", "--a|1|--b|3"),
    "words given to it": ("A=$1\nB=${2:-5}", f"source ./more.sh 4\n{RUN} --a $A --b $B",
                          "--a|4|--b|5"),
    "a value that the script sets": ("A=\"--a $LAYERS\"", f"LAYERS=7\nsource ./more.sh\n{RUN} $A",
                                     "--a|7"),
    "a value that it overrides": ("X=2", f"X=1\nsource ./more.sh\nX=${{X}}0\n{RUN} --a $X",
                                  "--a|20"),
    "return ends it": ("A=1\nreturn 0\nA=2", f"source ./more.sh\n{RUN} --a $A", "--a|1"),
}  # fmt: skip
POSITIONAL = {
    "a size": (f"{RUN} --a $1 --b $2", ["8B", "1"], "--a|8B|--b|1"),
    "defaults": (f"{RUN} --a ${{1:-7B}} --b ${{2:-3}}", ["8B"], "--a|8B|--b|3"),
    "shift": (f'A=$1; shift\n{RUN} --a $A "$@"', ["x", "--b", "2"], "--a|x|--b|2"),
    "their number": (f"[ $# -eq 2 ] && A=two || A=other\n{RUN} --a $A", ["p", "q"], "--a|two"),
    "options in a loop": (
        'while [[ $# -gt 0 ]]; do case "$1" in --size) S="$2"; shift 2;; -b) B=1; shift;; '
        f"*) shift;; esac; done\n{RUN} --a $S --b ${{B:-0}}",
        ["--size", "13B", "-b", "else"], "--a|13B|--b|1"),
    "all but the first": (f'{RUN} --a "${{@:2}}"', ["1", "2 3", "4"], "--a|2 3|4"),
    "loop over all": (f'for x in "$@"; do A+=(--x "$x"); done\n{RUN} "${{A[@]}}"', ["1", "2 3"],
                      "--x|1|--x|2 3"),
    "by a function": (f'f() {{ {RUN} --a "$1" --n $#; }}\nf "$2" 9', ["x", "y z"],
                      "--a|y z|--n|2"),
}  # fmt: skip
CASES = {
    "plain": ("M=8B\ncase $M in 7B) L=1;; 8B) L=2;; *) L=3;; esac", "--a|2"),
    "alternatives": ('M=13b\ncase "$M" in 7B|7b) L=1;; 13B|13b) L=2;; esac', "--a|2"),
    "a pattern": ("M=llama3-8b\ncase $M in llama2*) L=1;; llama3-[0-9]b) L=2;; esac", "--a|2"),
    "falls through": ("M=a; L=\ncase $M in a) L+=1;& b) L+=2;; c) L+=3;; esac", "--a|12"),
    "none that matches": ("L=9\nM=z\ncase $M in a) L=1;; esac", "--a|9"),
    "nested": ("M=a; N=b\ncase $M in a) case $N in b) L=4;; esac;; esac", "--a|4"),
    "lower case": ("M=BIG\ncase ${M,,} in big) L=5;; *) L=6;; esac", "--a|5"),
    "quoted star": ("M=x\ncase $M in '*') L=1;; *) L=2;; esac", "--a|2"),
}
LAUNCHED = {
    "srun bash -c": (f'X="{RUN} --a 1"\nsrun bash -c "$X --b 2"', "--a|1|--b|2"),
    "options of both": (f"srun -N2 bash -ec '{RUN} --a 1'", "--a|1"),
    "an array in a string": (f'A=(--a "1 2")\nX="{RUN} ${{A[*]}}"\neval $X', "--a|1|2"),
    "cd before": (f'eval "cd / && {RUN} --a 1 > /dev/null 2>&1"', "--a|1"),
    "a launcher's variable": (
        'L="torchrun --nproc_per_node 8"\n$L pretrain_gpt.py --a 1 |& tee /dev/null', "--a|1"),
    "appended in an if": (
        f'X="--a 1"\nif [ 1 -eq 1 ]; then X="$X --b 2"; fi\n{RUN} $X', "--a|1|--b|2"),
    "a default with quotes": (f'{RUN} --a ${{U:-"1 2"}} "${{V:-x y}}"', "--a|1 2|x y"),
    "a module": ("torchrun -m megatron.training.pretrain_gpt --a 1", "--a|1"),
}  # fmt: skip


FILES = {
    "cat": (f"{RUN} $(cat more.sh)", "--a|1|--b|x"),
    "cat by the script's folder": (
        f'{RUN} $(cat "$(dirname "$0")/more.sh") --c',
        "--a|1|--b|x|--c",
    ),
    "backticks": (f"A=`cat ./more.sh`\n{RUN} $A", "--a|1|--b|x"),
    "in quotes": (f'A="$(cat more.sh)"\n{RUN} --x "$A"', "--x|--a 1\n--b x"),
    "into a pipe": (f"A=$(cat more.sh | tr 1 7)\n{RUN} $A", "--a|7|--b|x"),
}


def _by_bash(folder: Path, arguments: list[str]) -> list[str]:
    """Run the script with stand-ins for the launchers; return the words behind the training."""
    bin_ = folder / "bin"
    bin_.mkdir()
    for name, text in (
        ("torchrun", f'#!/bin/bash\nprintf "%s\\0" "$@" >> {folder}/words\n'),
        ("srun", '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n'),
    ):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    subprocess.run(
        ["bash", "--noprofile", "--norc", str(folder / "run.sh"), *arguments],
        cwd=folder,
        env={"PATH": f"{bin_}:/usr/bin:/bin"},
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=20,
    )
    words = (folder / "words").read_text().split("\0")[:-1]
    return words[next(i for i, word in enumerate(words) if "pretrain_gpt" in word) + 1 :]


def _check(folder: Path, text: str, words: str, arguments: list[str]) -> None:
    script = folder / "run.sh"
    script.write_text(f"#!/bin/bash\n{text}\n")
    read = read_script(script, script.read_text(), arguments)
    assert [word.text if word.is_known else "?" for word in read.words] == words.split("|")
    assert not read.unread
    assert _by_bash(folder, arguments) == words.split("|")


@pytest.mark.parametrize("name", SOURCED)
def test_sourced_files(tmp_path: Path, name: str) -> None:
    beside, text, words = SOURCED[name]
    (tmp_path / "more.sh").write_text(beside + "\n")
    _check(tmp_path, text, words, [])


@pytest.mark.parametrize("name", FILES)
def test_files_that_a_script_prints(tmp_path: Path, name: str) -> None:
    text, words = FILES[name]
    (tmp_path / "more.sh").write_text("--a 1\n--b x\n")
    _check(tmp_path, text, words, [])


def test_what_a_file_elsewhere_holds_is_not_known(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{RUN} --a $(cat absent.txt) $(cat -n run.sh) $(cat run.sh run.sh)\n")
    words = read_script(script, script.read_text()).words
    assert [word.is_known for word in words] == [True, False, False, False]


@pytest.mark.parametrize("name", POSITIONAL)
def test_arguments_of_a_script(tmp_path: Path, name: str) -> None:
    text, arguments, words = POSITIONAL[name]
    _check(tmp_path, text, words, arguments)


@pytest.mark.parametrize("name", CASES)
def test_case_statements(tmp_path: Path, name: str) -> None:
    text, words = CASES[name]
    _check(tmp_path, f"{text}\n{RUN} --a $L", words, [])


@pytest.mark.parametrize("name", LAUNCHED)
def test_launch_lines(tmp_path: Path, name: str) -> None:
    text, words = LAUNCHED[name]
    _check(tmp_path, text, words, [])
