"""The layers: planning loads no torch, and left never imports right."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import megatron_hetero

ROOT = Path(__file__).resolve().parent.parent


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    code += "\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return {name.partition(".")[0] for name in done.stdout.splitlines()}


PLANNING = (
    "", ".planner", ".flags", ".flags.emit", ".flags.launch", ".plan.file", ".cli.main",
    ".cli.plan", ".cli.explain", ".cli.flags", ".cli.verify", ".cli.report", ".cli.probe",
    ".cli.doctor", ".report.text.terminal",
)  # fmt: skip
HEAVY = {"torch", "megatron", "matplotlib", "scipy"}


def test_importing_a_planning_module_loads_neither_torch_nor_scipy() -> None:
    """One after the other in one interpreter: what none has loaded, none of them loads."""
    code = f"""
import sys
from importlib import import_module
for module in {PLANNING}:
    import_module("megatron_hetero" + module)
    loaded = {HEAVY} & set(sys.modules)
    assert not loaded, f"megatron_hetero{{module}} loads {{loaded}}"
"""
    assert not loaded_after(code) & HEAVY


def test_help_loads_next_to_nothing() -> None:
    loaded = loaded_after(
        "from megatron_hetero.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    )
    assert not loaded & {"torch", "megatron", "pydantic", "scipy", "numpy", "networkx"}


def test_the_import_contracts_hold() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint_imports, "--no-cache"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


_PROSE = ("cli", "files", "report")
"""Rooms that say in sentences, or by their verbs, what their files are."""


def test_every_room_says_what_its_files_are() -> None:
    package = Path(megatron_hetero.__file__).parent
    for init in sorted(package.rglob("*/__init__.py")):
        room = init.parent.relative_to(package).as_posix()
        files = {path.stem for path in init.parent.glob("*.py")} - {"__init__"}
        if room in _PROSE or not files:
            continue
        doc = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        _, _, index = doc.partition("\n\n")
        named = {line.split()[0] for line in index.splitlines() if line.strip()}
        # The rooms inside may be named too.
        rooms = {path.parent.name for path in init.parent.glob("*/__init__.py")}
        assert files <= named <= files | rooms, f"{room}: the docstring lists other files"
