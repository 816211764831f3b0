"""List the modules of the package that no verb, job or documented Python call reaches.

python tools/unreached.py            # exit 1 if there is one

The roots are the verbs of the command line, the doors of a job (`pretrain_gpt`, `launch`, `hook`),
the programs that the package starts with `python -m`, and each module that a page of `docs/` or
README imports in an example.  A module is reached if a chain of imports leads to it from a root.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "megatron_hetero"
DOORS = ("__main__", "api", "hook", "launch", "pretrain_gpt")
_IN_PAGES = re.compile(rf"(?:from|import) ({PACKAGE}(?:\.\w+)*)")
_STARTED = re.compile(rf'"({PACKAGE}(?:\.\w+)+)"')


def unreached() -> tuple[str, ...]:
    """Return the names of the modules that no root reaches, in order."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    roots = {name for name in _roots() if name in graph.modules}
    reached = set(roots)
    waiting = list(roots)
    while waiting:
        for module in graph.find_modules_directly_imported_by(waiting.pop()) - reached:
            reached.add(module)
            waiting.append(module)
    # A package's own file says what the folder holds; the folder is reached if a module in it is.
    packages = {module.rpartition(".")[0] for module in graph.modules}
    return tuple(sorted(graph.modules - reached - packages))


def _roots() -> Iterator[str]:
    yield from (f"{PACKAGE}.{door}" for door in DOORS)
    for path in (ROOT / PACKAGE / "cli").glob("*.py"):
        yield f"{PACKAGE}.cli.{path.stem}"
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        yield from _IN_PAGES.findall(page.read_text())
    # Modules that the package imports late or starts as processes are named in strings.
    for path in (ROOT / PACKAGE).rglob("*.py"):
        yield from _STARTED.findall(path.read_text())


if __name__ == "__main__":
    found = unreached()
    print("\n".join(found) or "every module is reached")
    sys.exit(1 if found else 0)
