"""Variables that a launcher hands to what it starts: `docker run -e A=1`, `sbatch --export=A=1`."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_hetero.model.shell.fields import split
from megatron_hetero.model.shell.held import Variable
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.values import Word, concatenate

SETTING = re.compile(r"(?P<name>[A-Za-z_]\w*)=")
"""The beginning of a word `NAME=value`."""
_OPTION = re.compile(r"(?:--[a-z-]+=|-e|-x)?(?=[A-Za-z_]\w*=)")
"""What may stand before a setting in one word: `--env=A=1`, `-eA=1`."""
_NAMED = re.compile(r"""(?:^|[,\s"'{=])(?:(\w+)["']?\s*=|["'](\w+)["']\s*:)""")
"""Names that a word seems to set: `A=1,B=2`, `{"env_vars": {"A": "1"}}`."""
_HANDS_ON = ("-e", "--env", "-x")
"""Options whose next word is a name alone: the launcher hands on its own value."""
_OF_HYDRA = ("-env", "-genv")
"""Options of `mpiexec` with two words, a name and a value."""
_OF_CONTAINERS = re.compile(r"(?:SINGULARITYENV|APPTAINERENV)_(\w+)")


@dataclass
class Passed:
    """What a launcher does to the variables of what it starts.

    `values`: variables that it sets.  `removed`: those that it unsets.  `only`: names that alone
    are handed on; None for all.  `doubt`: why those of the shell may not reach the child, or "".
    """

    values: dict[str, Word] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    only: frozenset[str] | None = None
    doubt: str = ""


def setting(word: Word, name: str) -> tuple[str, Word]:
    """Return the name and value of a word `NAME=value`."""
    first, *rest = word.parts or (word,)
    value = first._replace(text=(first.text or "")[len(name) + 1 :])
    return name, concatenate([value, *rest])


def shown(word: Word) -> str:
    """Return what is known of the beginning of a word."""
    first = (word.parts or (word,))[0]
    return (first.text or "") if first.is_known else ""


def passed(shell: Shell, words: Sequence[Word], settings: Sequence[tuple[str, Word]]) -> Passed:
    """Read the variables in the words of a launcher.

    Args:
        words: the launcher and its options, without the script or code that it starts.
        settings: variables that stand before the launcher.
    """
    found = Passed()
    texts = [shown(word) for word in words]
    launcher = os.path.basename(texts[0]) if texts else ""
    for i, word in enumerate(words):
        following = words[i + 1 :]
        if texts[i] == "--export" and following:
            _of_slurm(shell, following[0], found)
        elif texts[i].startswith("--export="):
            _of_slurm(shell, setting(word, "--export")[1], found)
        elif texts[i].startswith("--env-file"):
            shell.note("", f"variables in the --env-file of {launcher} are not read")
        elif texts[i] in _HANDS_ON and following:
            _hand_on(shell, following[0], found)
        elif texts[i] in _OF_HYDRA and len(following) > 1 and following[0].is_known:
            found.values[following[0].text or ""] = following[1]
        elif texts[i] in ("-u", "--unset") and launcher == "env" and following:
            found.removed.add(texts[i + 1])
        elif texts[i].startswith("--unset="):
            found.removed.add(texts[i].partition("=")[2])
        elif i == 0 or texts[i - 1] != "--export":
            found.values.update(_of_word(shell, word, launcher))
    # Containers of these two take variables by the front of their names.
    if {"singularity", "apptainer"} & {os.path.basename(text) for text in texts}:
        for name, word in _outside(shell, settings):
            if match := _OF_CONTAINERS.fullmatch(name):
                found.values[match[1]] = word
    # What `sudo` keeps is a matter of the machine's own rules.
    if "sudo" in texts and not any(re.match(r"-E|--preserve-env", text) for text in texts):
        found.doubt = "is exported, and sudo may not keep it"
    return found


def _outside(shell: Shell, settings: Sequence[tuple[str, Word]]) -> Iterator[tuple[str, Word]]:
    """Yield the variables that the launcher itself sees."""
    for name in shell.exported:
        held = shell.variables.get(name)
        if held is not None and held.words and not held.is_array:
            yield name, held.words[0]
    yield from settings


def _of_slurm(shell: Shell, value: Word, found: Passed) -> None:
    """Read `--export=ALL,A=1,B` of Slurm: without ALL, what is named alone is handed on."""
    items = split(value, ",")
    # Slurm has quotes of its own around a value with commas.
    if any("'" in shown(item) or '"' in shown(item) for item in items):
        found.values.update(_doubted(shell, value, "Slurm"))
        return
    names = frozenset(item.text or "" for item in items if item.is_known)
    for item in items:
        if match := SETTING.match(shown(item)):
            found.values.update([setting(item, match["name"])])
    if not names & {"ALL", ""} and all(
        item.is_known or SETTING.match(shown(item)) for item in items
    ):
        found.only = names


def _hand_on(shell: Shell, word: Word, found: Passed) -> None:
    """Read the name behind `-e`, whose value is that of the shell."""
    name, held = word.text or "", shell.variables.get(word.text or "")
    if name in shell.exported and held is not None and held.words and not held.is_array:
        found.values[name] = held.words[0]


def _of_word(shell: Shell, word: Word, launcher: str) -> dict[str, Word]:
    """Return the variables that a word of a launcher sets, without values where it may be several
    (`--env A=1,B=2`)."""
    first, *rest = word.parts or (word,)
    option = _OPTION.match(shown(word))
    if option is None or "," in (first.text or ""):
        return _doubted(shell, word, launcher)
    bare = concatenate([first._replace(text=(first.text or "")[option.end() :]), *rest])
    match = SETTING.match(shown(bare))
    # `--gpus=2` has an option's name before the sign.
    return dict([setting(bare, match["name"])]) if match else {}


def _doubted(shell: Shell, word: Word, launcher: str) -> dict[str, Word]:
    text = "".join(part.text or "" for part in word.parts or (word,))
    names = [one or other for one, other in _NAMED.findall(text)]
    return {
        name: Word(None, shell.where, f"{name} may be set by {launcher}", True, may_split=True)
        for name in names
    }


def hand_over(shell: Shell, child: Shell, found: Passed) -> None:
    """Give a child shell what a launcher hands to it, over what the child has."""
    for name in list(child.variables):
        if name in found.removed or (found.only is not None and name not in found.only):
            child.variables.pop(name)
            child.exported.pop(name, None)
        elif found.doubt:
            why = f"{name} {found.doubt}"
            child.variables[name] = Variable((Word(None, shell.where, why, True, may_split=True),))
    child.unset |= found.removed
    for name, word in found.values.items():
        child.set_variable(name, Variable((word,)))
        child.exported[name] = ""
