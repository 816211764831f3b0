"""Result files: what a command found, and when, where and by which commit.

    python tools/results.py                 which there are, with command, date and machine
    python tools/results.py gaps            run the command of benchmarks/results/gaps.json again
    python tools/results.py gaps --rows two-sites budget        the same for these rows (`--only`)
    python tools/results.py gaps --tables jobs --kind measured -- python tools/bench gaps

A file of `benchmarks/results` holds the tables and figures that pages show (`tools/pages.py` puts
them there).  They are taken from the Markdown tables that the command prints, in that order.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"

Cell = str | int | float | None
Kind = Literal["measured", "computed"]
OVER_COLUMNS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "least": min,
    "most": max,
    "mean": statistics.mean,
    "median": statistics.median,
    "geomean": statistics.geometric_mean,
    "largest": lambda values: max(map(abs, values)),
}


@dataclass(frozen=True)
class Table:
    """Rows below titles; an empty cell is None."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def markdown(self) -> str:
        """Write the table as Markdown, columns of figures to the right."""
        cells = [[_text(cell) for cell in row] for row in self.rows]
        marks = [
            "--:" if all(map(_is_figure, column)) else "---" for column in zip(*cells, strict=True)
        ]
        lines = [self.columns, marks, *cells]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)

    def with_rows(self, made: Table, name: str) -> Table:
        """Put the rows of another table, called `name`, in the place of those that begin alike.

        Raises:
            SystemExit: a row begins like none of this table, or the columns are others.
        """
        by_first: dict[Cell, list[Sequence[Cell]]] = {}
        for row in made.rows:
            by_first.setdefault(row[0], []).append(row)
        known, replaced = {row[0] for row in self.rows}, set(by_first)
        if not known.issuperset(by_first) or list(made.columns) != list(self.columns):
            others = ", ".join(str(first) for first in by_first if first not in known)
            raise SystemExit(f"{name}: {others or 'the new rows'} are no rows of it; run it whole")
        rows: list[Sequence[Cell]] = []
        for row in self.rows:
            # Several rows may begin alike: all new ones come with the first old one.
            rows += by_first.pop(row[0], ()) if row[0] in replaced else [row]
        return Table(self.columns, rows)

    def over(self, name: str, column: str) -> str:
        """Return one of `OVER_COLUMNS` of a column, `largest` without regard to the sign,
        with as many decimals as its cells have.

        Raises:
            KeyError, ValueError: there is no such column, or it holds no figures.
        """
        if column not in self.columns:
            raise KeyError(f"there is no column {column!r} among {list(self.columns)}")
        index = list(self.columns).index(column)
        texts = [re.search(r"[-+]?[\d,]*\.?\d+", _text(row[index])) for row in self.rows]
        figures = [text[0].replace(",", "") for text in texts if text is not None]
        decimals = max(len(figure.partition(".")[2]) for figure in figures)
        return f"{OVER_COLUMNS[name]([float(figure) for figure in figures]):.{decimals}f}"


@dataclass(frozen=True)
class Result:
    """What one command found.

    Attributes:
        kind: "measured" depends on the machine; "computed" is the same on every machine.
        commit: of the repository when it was found; "+" behind it: with changes not committed.
        date: the day, year first.
        machine: its class, where it was measured.
    """

    command: str
    kind: Kind
    commit: str
    date: str
    machine: str
    figures: Mapping[str, Cell] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)

    def when(self) -> str:
        """Write one line for readers: when, where and by which commit."""
        where = f" on {self.machine}" if self.kind == "measured" else ""
        return f"{self.kind}{where}, {self.date}, commit {self.commit}"

    def origin(self) -> str:
        """Write `when` with the command."""
        return f"`{self.command}`, {self.when()}"


def found(
    command: str, kind: Kind, figures: Mapping[str, Cell], tables: Mapping[str, Table]
) -> Result:
    """Make the result of what was found now, here, by the commit that is checked out."""
    day = datetime.now(UTC).date().isoformat()
    return Result(command, kind, _commit(), day, _machine(), dict(figures), dict(tables))


def save(result: Result, name: str) -> Path:
    """Write `benchmarks/results/NAME.json`."""
    path = FOLDER / f"{name}.json"
    FOLDER.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n")
    return path


def load(name: str) -> Result:
    """Read `benchmarks/results/NAME.json`.

    Raises:
        FileNotFoundError, TypeError: there is no such file, or it is none of ours.
    """
    data = json.loads((FOLDER / f"{name}.json").read_text())
    tables = {key: Table(**table) for key, table in data.pop("tables").items()}
    return Result(**data, tables=tables)


def names() -> list[str]:
    """Find the results that there are; other files of the folder have no tables."""
    read = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
    return sorted(name for name, data in read.items() if isinstance(data.get("tables"), dict))


def tables_in(text: str) -> list[Table]:
    """Read the Markdown tables of a text, in its order."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        if not inside:
            found.append([])
        inside = True
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        found[-1].append([cell.strip() for cell in cells])
    return [
        Table(columns, [row for row in rows if set("".join(row)) - set("-: ")])
        for columns, *rows in found
    ]


def again(result: Result) -> Result:
    """Run a result's command again and take the tables that it prints.

    Raises:
        SystemExit: the command fails, or prints another number of tables.
    """
    done = subprocess.run(
        [sys.executable if word == "python" else word for word in shlex.split(result.command)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    tables = tables_in(done.stdout)
    if done.returncode or len(tables) != len(result.tables):
        raise SystemExit(
            f"`{result.command}` ended with status {done.returncode} and {len(tables)} tables, "
            f"not with {len(result.tables)} ({', '.join(result.tables)}):\n{done.stdout}"
        )
    named = {
        name: _with_commits(before, table)
        for (name, before), table in zip(result.tables.items(), tables, strict=True)
    }
    return found(result.command, result.kind, {}, named)


def _with_commits(before: Table, table: Table) -> Table:
    """Add the column that says which commit each row is of, where the table had it before."""
    own = "commit"
    if own not in before.columns or own in table.columns:
        return table
    return Table([*table.columns, own], [[*row, _commit()] for row in table.rows])


def again_in_part(result: Result, rows: Sequence[str]) -> Result:
    """Run a result's command again with `--only ROWS`, which it must take, and put the rows that it
    prints in the place of those that begin alike; `commit` says which they are.

    Raises:
        SystemExit: the command fails, or prints a row that the result has not.
    """
    part = again(
        replace(result, command=shlex.join([*shlex.split(result.command), "--only", *rows]))
    )
    tables = {
        name: table.with_rows(part.tables[name], name) for name, table in result.tables.items()
    }
    commit = f"{result.commit}; {', '.join(rows)}: {part.commit}"
    # Rows that say their commit themselves need no list of them.
    if all("commit" in table.columns for table in tables.values()):
        commit = part.commit
    return replace(result, commit=commit, date=part.date, tables=tables)


def _text(cell: Cell) -> str:
    return "" if cell is None else str(cell)


def _is_figure(cell: str) -> bool:
    """Return whether a cell begins with digits, or is empty."""
    return not cell or cell.strip("+-<>~")[:1].isdigit() or cell == "-"


def _commit() -> str:
    """Return the commit, with "+" where files are changed; a source archive has none."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "megatron_hetero", "tools")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "a source archive"


def _machine() -> str:
    return f"{os.cpu_count()} CPU cores without a GPU"


def main(arguments: list[str] | None = None) -> int:
    """List results, or make one anew; `arguments` are those of the command line by default."""
    words = sys.argv[1:] if arguments is None else arguments
    # Two positional arguments of unknown number cannot stand on both sides of an option.
    end = words.index("--") if "--" in words else len(words)
    own, command = words[:end], words[end + 1 :]
    parser = argparse.ArgumentParser(
        usage="%(prog)s [NAME [--rows ROW ...]] [--tables TABLE ...] [--kind KIND] [-- COMMAND]",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="COMMAND: what prints the tables; by default the command that the file names",
    )
    parser.add_argument("name", nargs="?", help="of a file in benchmarks/results")
    parser.add_argument(
        "--rows", nargs="+", metavar="ROW", help="make these again and keep the others"
    )
    parser.add_argument("--tables", nargs="+", default=["all"], help="names of what is printed")
    parser.add_argument("--kind", choices=("measured", "computed"), default="measured")
    options = parser.parse_args(own)
    if options.name is None:
        for name in names():
            print(f"{name:20} {load(name).origin()}")
        return 0
    if command:
        no_rows = {table: Table((), ()) for table in options.tables}
        before = found(shlex.join(command), options.kind, {}, no_rows)
    else:
        before = load(options.name)
    made = again_in_part(before, options.rows) if options.rows else again(before)
    print(save(made, options.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
