"""Run a benchmark by its name.

    python tools/bench                          which there are
    python tools/bench NAME [--json] [...]      run one; --help has its options

With --json, rows are printed as a list at the end, for programs.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent
if __name__ == "__main__":
    # Python puts this folder there, whose names are those of subjects.
    sys.path[0] = str(FOLDER.parents[1])

from megatron_hetero.errors import HeteroError  # noqa: E402
from tools.bench.show import show  # noqa: E402


def benchmarks() -> dict[str, Path]:
    """Return the file of each benchmark, by its name."""
    paths = sorted(FOLDER.glob("*/*.py"), key=lambda path: path.stem)
    return {path.stem.replace("_", "-"): path for path in paths if path.stem != "__init__"}


def listing() -> str:
    """Return a line for each benchmark: the first paragraph of its docstring."""
    lines = []
    for name, path in benchmarks().items():
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"{name:18} {' '.join(text.partition('\n\n')[0].split())}")
    return "\n".join(lines)


def loaded(name: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    """Return the module of a benchmark, and what reads its command line."""
    path = benchmarks()[name]
    module = import_module(f"tools.bench.{path.parent.name}.{path.stem}")
    parser = argparse.ArgumentParser(
        prog=f"tools/bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for flags, settings in module.OPTIONS:
        parser.add_argument(*flags, **settings)
    parser.add_argument("--json", action="store_true", help="a list of rows, for programs")
    return module, parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the arguments name; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    names = benchmarks()
    if not words or words[0] in ("-h", "--help"):
        print(f"{(__doc__ or '').strip()}\n\n{listing()}")
        return 0
    name, *rest = words
    if name not in names:
        print(f"there is no benchmark {name!r}, but {', '.join(names)}", file=sys.stderr)
        return 2
    module, parser = loaded(name)
    given = parser.parse_args(rest)
    try:
        return show(module.run(given), as_json=given.json)
    except HeteroError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
