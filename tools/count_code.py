"""Lines of code, numeric literals and switches on the size of a cluster, folder by folder.

    python tools/count_code.py [--tree FOLDER] [FOLDER ...]

The folders are of the package, as in ``planner bounds`` (both by default).  A line counts if it has
anything but a comment or a docstring.  Literals are numbers other than -1, 0, 1 and 2, wherever
they stand.  A switch compares a number of GPUs or nodes with a constant or a limit; each is listed.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PLAIN = (0, 1, 2)
"""Numbers that need no name; -1 is 1 with a sign."""
_SIZES = ("num_gpus", "num_nodes", ".nodes)", ".devices)")
"""Parts of expressions that are as large as a cluster."""
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


@dataclass
class Count:
    """Of one folder; `switches` are (place, comparison)."""

    num_files: int = 0
    num_lines: int = 0
    num_literals: int = 0
    switches: list[tuple[str, str]] = field(default_factory=list)

    def add(self, path: Path, name: str) -> None:
        """Count a file."""
        source = path.read_text()
        tree = ast.parse(source)
        self.num_files += 1
        self.num_lines += len(code_lines(source, tree))
        self.num_literals += sum(1 for _ in literals(tree))
        self.switches += [(f"{name}:{line}", text) for line, text in switches(tree)]


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that hold code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT and token.type != tokenize.ENDMARKER:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        # A string by itself is a docstring, of whatever stands before it.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def literals(tree: ast.Module) -> Iterator[float]:
    """Yield every number that is not plain."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and value not in PLAIN:
            yield value


def switches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comparison of a size with a constant or a limit."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        texts = [ast.unparse(side) for side in sides]
        is_size = any(part in text for text in texts for part in _SIZES)
        if is_size and any(map(_is_limit, sides)):
            yield node.lineno, ast.unparse(node)


def _is_limit(side: ast.expr) -> bool:
    if isinstance(side, ast.Constant):
        return side.value not in (None, *PLAIN)
    text = ast.unparse(side).split("[")[0].rpartition(".")[2].lstrip("_")
    return text.isupper() or text.startswith("max_")


def count(package: Path, folder: str) -> Count:
    """Return the count of one folder of the package, with all below it."""
    found = Count()
    for path in sorted((package / folder).rglob("*.py")):
        found.add(path, str(path.relative_to(package)))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folders", nargs="*", default=["planner", "bounds"], metavar="FOLDER")
    own = Path(__file__).resolve().parents[1]
    parser.add_argument("--tree", type=Path, default=own, metavar="FOLDER", help="a checkout")
    options = parser.parse_args(arguments)
    print("| folder | files | lines of code | numeric literals | switches on size |")
    print("| --- | --: | --: | --: | --: |")
    counts = [(name, count(options.tree / "megatron_hetero", name)) for name in options.folders]
    for name, found in counts:
        print(
            f"| {name} | {found.num_files} | {found.num_lines:,} | {found.num_literals} "
            f"| {len(found.switches)} |"
        )
    for _, found in counts:
        for place, text in found.switches:
            print(f"{place}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
