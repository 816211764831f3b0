"""The scripts behind make: which Python is taken, and what is said when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FIND_PYTHON = ROOT / "tools" / "find_python.sh"


def find_python(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", FIND_PYTHON],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/nowhere", "HOME": "/nowhere", **environment},
    )


def fake_python(path: Path, works: bool = True) -> Path:
    """A program in the place of a Python: this one, or one that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" "$@"\n' if works else "#!/bin/sh\nexit 1\n"
    )
    path.chmod(0o755)
    return path


needs_a_suitable_python = pytest.mark.skipif(
    not (3, 12) <= sys.version_info[:2] <= (3, 13), reason="the tests run on another Python"
)


@needs_a_suitable_python
def test_the_variable_comes_first(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "mine")
    assert find_python(PYTHON=str(python)).stdout == f"{python}\n"


def test_a_wrong_variable_is_an_error_not_a_hint(tmp_path: Path) -> None:
    done = find_python(PYTHON=str(fake_python(tmp_path / "mine", works=False)))
    assert done.returncode == 1
    assert "is not Python 3.12 or 3.13" in done.stderr


@needs_a_suitable_python
def test_a_shim_on_the_path_that_fails_is_passed_over(tmp_path: Path) -> None:
    fake_python(tmp_path / "shims" / "python3.12", works=False)
    good = fake_python(tmp_path / "bin" / "python3.13")
    path = os.pathsep.join([str(tmp_path / "shims"), str(tmp_path / "bin")])
    assert find_python(PATH=path).stdout == f"{good}\n"


@needs_a_suitable_python
@pytest.mark.parametrize(
    ("variable", "folder"),
    [("PYENV_ROOT", "versions/3.12.1"), ("UV_PYTHON_INSTALL_DIR", "cpython-3.12.1-linux")],
)
def test_versions_of_pyenv_and_uv_are_found(tmp_path: Path, variable: str, folder: str) -> None:
    python = fake_python(tmp_path / folder / "bin" / "python3.12")
    assert find_python(**{variable: str(tmp_path)}).stdout == f"{python}\n"


def test_without_any_python_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "cat").symlink_to("/bin/cat")
    done = find_python(PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "apt install python3.12 python3.12-venv" in done.stderr
    assert "make demo PYTHON=" in done.stderr
