"""Installation on the machines of a job: the wheel of `make dist`, with the tested versions."""

from __future__ import annotations

import re
import shlex
import zipfile
from dataclasses import dataclass
from pathlib import Path

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.job import LaunchFile
from megatron_hetero.flags.launchers.node_script import VENV_NAME

INSTALL_NAME = "install.sh"
EXTRA = "tested"
"""The wheel's extra that pins the runtime (`setup.py`)."""

_FILE = re.compile(r"megatron_hetero-[\w.+]+-py3-none-any\.whl", re.ASCII)
_URL = re.compile(rf"https://[\w.:-]+/(?:[\w.~%+-]+/)*{_FILE.pattern}(?:#sha256=[0-9a-f]{{64}})?")

_SCRIPT = """\
#!/usr/bin/env bash
# Installs megatron-hetero and its runtime, at the versions that it is tested with, into {venv}/
# beside this file, where train.sh finds it:   bash install.sh
#
# Once for all machines that share this folder, else on each of them.
set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
venv=$here/{venv}
# Where uv's own installer, and SkyPilot, put it.
PATH=$PATH:$HOME/.local/bin
wanted={wanted}
if [ -x "$venv/bin/torchrun" ] && [ "$(cat -- "$venv/installed" 2>/dev/null)" = "$wanted" ]; then
    echo "install.sh: $wanted is there"
    exit 0
fi
fits='import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))'
python=
for candidate in ${{PYTHON:+"$PYTHON"}} python3.12 python3.13 python3; do
    if "$candidate" -c "$fits" 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -n "$python" ]; then
    "$python" -m venv --clear "$venv"
elif command -v uv >/dev/null; then
    uv venv --clear --seed --python 3.12 "$venv"
else
    echo "install.sh: no Python 3.12 or 3.13 with venv here, and no uv; install one of them, or" >&2
    echo "            say which:   PYTHON=/path/to/python3.12 bash install.sh" >&2
    exit 5
fi
"$venv/bin/python" -m pip install --disable-pip-version-check {requirement}
printf '%s\\n' "$wanted" >"$venv/installed"
"""


@dataclass(frozen=True)
class Wheel:
    """The wheel: its file name, and its URL or the file to copy beside `train.sh`."""

    name: str
    url: str | None = None
    path: Path | None = None


def find_wheel(given: str) -> Wheel:
    """Find the wheel that the user names by a path or an https URL.

    Raises:
        UsageError: the text is neither, or names a file that `make dist` did not build.
    """
    # A URL is given to pip as it is, with its hash, and the machines fetch the wheel.
    if "://" in given:
        if not _URL.fullmatch(given):
            raise UsageError(
                f"--wheel {given}: an https URL of megatron_hetero-VERSION-py3-none-any.whl is "
                "wanted (#sha256=... may follow)"
            )
        return Wheel(given.partition("#")[0].rpartition("/")[2], url=given)
    path = Path(given)
    if not _FILE.fullmatch(path.name) or not path.is_file():
        raise UsageError(
            f"--wheel {given}: there is no such wheel; `make dist` builds "
            "dist/megatron_hetero-VERSION-py3-none-any.whl"
        )
    # A wheel of another build would install untested versions.
    if f"Provides-Extra: {EXTRA}\n" not in _metadata(path):
        raise UsageError(f"--wheel {given}: it has no extra {EXTRA!r}; build it by `make dist`")
    return Wheel(path.name, path=path)


def install_script(wheel: Wheel) -> LaunchFile:
    """Write `install.sh`, the same on every machine."""
    # The wheel lies beside the script.
    if wheel.url is None:
        requirement = f'"$here/{wheel.name}[{EXTRA}]"'
    else:
        requirement = shlex.quote(f"megatron-hetero[{EXTRA}] @ {wheel.url}")
    text = _SCRIPT.format(
        venv=VENV_NAME, wanted=shlex.quote(wheel.url or wheel.name), requirement=requirement
    )
    return LaunchFile(INSTALL_NAME, text, executable=True)


def _metadata(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            return archive.read(name).decode("utf-8")
    except (zipfile.BadZipFile, StopIteration, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"--wheel {path}: it is not a wheel") from error
