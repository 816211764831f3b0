"""What another release of Megatron changed of the symbols that this package relies on.

    python tools/canary.py --main                 # Megatron-LM's main of today, by git
    python tools/canary.py TREE-OR-WHEEL [...]

Compares every guarded symbol (`megatron_hetero/runtime/megatron/guards.py`) with the sources of a
checkout of Megatron-LM, of a folder with an unpacked wheel, or of a wheel.  Nothing of it is
imported or run.  Prints one line for each symbol that is gone or has an unknown source, with the
fingerprint to add once the change is read, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_hetero.runtime.megatron.guarded import (
    Guarded,
    names_of_globals,
    text_fingerprint,
)

REPOSITORY = "https://github.com/NVIDIA/Megatron-LM"
_MAX_IMPORTS = 8


class Sources:
    """The Python sources of a tree or a wheel, by the name of their module."""

    def __init__(self, path: Path) -> None:
        self._root = path
        self._wheel = zipfile.ZipFile(path) if path.is_file() else None
        self._parsed: dict[str, list[ast.stmt]] = {}

    def text(self, module: str) -> str | None:
        """Return a module's source; None where there is no such module."""
        base = module.replace(".", "/")
        return self._read(f"{base}.py") or self._read(f"{base}/__init__.py")

    def _read(self, name: str) -> str | None:
        if self._wheel is None:
            path = self._root / name
            return path.read_text("utf-8") if path.is_file() else None
        return self._wheel.read(name).decode("utf-8") if name in self._wheel.namelist() else None

    def fingerprint(self, symbol: Guarded) -> str | None:
        """Return a symbol's fingerprint, as `Guarded.found` would with this Megatron installed;
        None where it is not there."""
        if not symbol.name:
            text = self.text(symbol.module)
            return None if text is None else text_fingerprint(names_of_globals(text))
        source = self._source(symbol.module, symbol.name, _MAX_IMPORTS)
        return None if source is None else text_fingerprint(source)

    def _source(self, module: str, name: str, num_imports: int) -> str | None:
        """The source of `name` in a module, or where the module imports it from."""
        text = self.text(module)
        if text is None or num_imports == 0:
            return None
        first, *rest = name.split(".")
        if module not in self._parsed:
            self._parsed[module] = list(_statements(ast.parse(text)))
        for node in reversed(self._parsed[module]):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == first:
                for part in rest:
                    found = [n for n in node.body if getattr(n, "name", None) == part]
                    if not found:
                        return None
                    node = found[-1]  # type: ignore[assignment]
                return _lines_of(text, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == first:
                        origin = ".".join([alias.name, *rest])
                        return self._source(self._origin(module, node), origin, num_imports - 1)
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import statement of `module` names."""
        if node.level == 0:
            return str(node.module)
        parts = module.split(".")
        is_package = self._read(module.replace(".", "/") + ".py") is None
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a module's top level, those inside `if` and `try` included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(child)


def _lines_of(text: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """What `inspect.getsource` gives: from the first decorator on."""
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "".join(inspect.getblock(text.splitlines(keepends=True)[start - 1 :]))


def changes(path: Path, symbols: tuple[Guarded, ...]) -> list[str]:
    """One line for each symbol that is not as it is known."""
    sources = Sources(path)
    found = []
    for symbol in symbols:
        mark = sources.fingerprint(symbol)
        if mark not in symbol.known:
            what = "is not there" if mark is None else f"has the unknown source {mark}"
            found.append(
                f"{symbol.module}.{symbol.name or '(names of constants)'} {what}: {symbol.reason}"
            )
    return found


def cloned(repository: str, folder: Path) -> Path:
    """Return the newest tree of a repository's branch `main`, without its history."""
    tree = folder / "main"
    git = ["git", "clone", "--quiet", "--depth", "1", "--branch", "main", "--", repository]
    subprocess.run([*git, str(tree)], check=True)
    return tree


def main() -> int:
    """Compare what the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="TREE-OR-WHEEL")
    parser.add_argument(
        "--main",
        nargs="?",
        const=REPOSITORY,
        metavar="REPOSITORY",
        help=f"clone the branch main of a repository (default: {REPOSITORY}) and compare it",
    )
    options = parser.parse_args()
    if not options.paths and options.main is None:
        parser.error("name a tree or a wheel, or --main")
    with tempfile.TemporaryDirectory() as folder:
        clones = [] if options.main is None else [cloned(options.main, Path(folder))]
        return _compare([*options.paths, *clones])


def _compare(paths: list[Path]) -> int:
    from megatron_hetero.runtime.megatron.guards import guarded

    symbols = guarded()
    num_changed = 0
    for path in paths:
        lines = changes(path, symbols)
        print(f"{path}: {len(symbols)} guarded symbols, {len(lines)} not as they are known")
        print("".join(f"  {line}\n" for line in lines), end="")
        num_changed += len(lines)
    return int(num_changed > 0)


if __name__ == "__main__":
    sys.exit(main())
