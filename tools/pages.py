"""Refresh what commands and result files say in README.md and docs/, or check it.

    python tools/pages.py                     all pages and their pictures (`make pages`)
    python tools/pages.py README.md --check   compare instead of writing

A page marks what is made for it by comments, which readers do not see.  A block stands between
lines of its own, a figure inside a sentence; each ends with <!-- end -->:

    <!-- shown: plan --cluster C.yaml --model M -o plan.json -->  what the command prints, fenced
    <!-- shown: same then from Replica 0 then to time: -->        from a line that starts so, to one
    <!-- shown: same then find takes ([0-9.]+) longer -->         one figure of it
    <!-- picture: report plan.json ... then figures/map.svg -->   the file, into the image below
    <!-- result: gaps then table jobs -->                         a table of benchmarks/results/
    <!-- result: gaps then figure speed -->                       one figure of it
    <!-- result: gaps then median of jobs: gap % -->              over a column of a table
    <!-- result: gaps then origin -->                             command, date, machine, commit

    <!-- shown: ! plan --cluster C.yaml -->                       the error of what is refused

Commands are of megatron-hetero.  Those of a section (`##`) run in one folder, in the page's order,
with the examples in it and on 80 columns; `same` is the last one.  <!-- run: COMMAND --> stands
alone and shows nothing: what a later command needs.  <!-- slow --> leaves a section to the slow
tests.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import make_flags_page
import make_options_page
import results

from megatron_hetero.cli.main import main as megatron_hetero

ROOT = Path(__file__).resolve().parent.parent
PRINTED = (make_flags_page, make_options_page)
"""Tools that print a page whole."""
SLOW = "<!-- slow -->"
THEN = " then "
REFUSED = "! "

_MARK = re.compile(
    r"(?P<head>^(?P<indent> *)<!-- (?P<kind>shown|result|picture): (?P<what>[^\n]*?) -->\n)"
    r"(?P<body>.*?)(?P<tail>^ *<!-- end -->$)"
    r"|(?P<inline_head><!-- (?P<inline_kind>shown|result): (?P<inline_what>[^\n]*?) -->)"
    r"(?P<figure>[^\n<]*)(?P<inline_tail><!-- end -->)"
    r"|^ *<!-- run: (?P<run>[^\n]*?) -->$",
    re.MULTILINE | re.DOTALL,
)
_ANY_MARK = re.compile(r"<!-- (?:shown|result|picture|run): |<!-- end -->")


class PageError(Exception):
    """A mark that cannot be followed; the text says which and why."""


@dataclass
class Terminal:
    """Runs the commands of one section in a folder, each once."""

    folder: Path
    printed: dict[str, str] = field(default_factory=dict)
    last: str = ""

    def run(self, command: str) -> str:
        """Run `megatron-hetero COMMAND` and return what it prints; "same" is the last command.

        A command behind "! " is refused; what is shown then is the error, wrapped.

        Raises:
            PageError: it does not end with status 0, or does although it should be refused.
        """
        if command == "same":
            command = self.last
        if command not in self.printed:
            self.printed[command] = self._run(command)
        self.last = command
        return self.printed[command]

    def _run(self, command: str) -> str:
        examples = self.folder / "examples"
        if not examples.exists():
            examples.symlink_to(ROOT / "examples")
        out, error = io.StringIO(), io.StringIO()
        is_refused = command.startswith(REFUSED)
        words = shlex.split(command.removeprefix(REFUSED))
        with contextlib.ExitStack() as around:
            around.enter_context(contextlib.chdir(self.folder))
            around.enter_context(_environment())
            around.enter_context(contextlib.redirect_stdout(out))
            if is_refused:
                around.enter_context(contextlib.redirect_stderr(error))
            code = megatron_hetero(words)
        if (code != 0) != is_refused:
            raise PageError(f"`megatron-hetero {command}` ended with status {code}")
        return textwrap.fill(error.getvalue().strip(), 100) if is_refused else out.getvalue()


@dataclass
class Made:
    """A page, or a section of one, made anew, with its pictures by their paths."""

    text: str
    pictures: dict[Path, str] = field(default_factory=dict)

    def stale(self, before: str, page: Path) -> list[Path]:
        """Find what differs from what is there: the page itself, pictures."""
        stale = [] if self.text == before else [page]
        for path, picture in self.pictures.items():
            if not path.exists() or path.read_text(encoding="utf-8") != picture:
                stale.append(path)
        return stale


def sections(page: Path) -> list[str]:
    """Cut a page before each heading of the second level."""
    return re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def all_pages() -> list[Path]:
    """Return README.md and its neighbours, and docs/."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def marked_pages() -> list[Path]:
    """Return the pages with marks."""
    return [page for page in all_pages() if is_marked(page.read_text(encoding="utf-8"))]


def is_marked(text: str) -> bool:
    """Return whether something in the text is made by a command or from a result file."""
    return _ANY_MARK.search(text) is not None


def made_section(text: str, page: Path, terminal: Terminal) -> Made:
    """Make the marked places of one section of a page anew.

    Raises:
        PageError: a mark cannot be followed, or has no end.
    """
    section = Made("")
    understood = 0

    def made(match: re.Match[str]) -> str:
        nonlocal understood
        understood += 1 if match["run"] else 2
        if match["run"]:
            terminal.run(match["run"])
            return match[0]
        if match["inline_head"]:
            if text[: match.start()].endswith("\n"):
                what = match["inline_what"]
                raise PageError(f'"{what}" stands first in its line, which begins a block of HTML')
            figure = _value(match["inline_kind"], match["inline_what"], terminal)
            return match["inline_head"] + figure.strip() + match["inline_tail"]
        if match["kind"] == "picture":
            path = page.parent / _image(match["body"], match["what"])
            section.pictures[path] = _picture(match["what"], terminal)
            return match[0]
        body = _value(match["kind"], match["what"], terminal)
        if match["kind"] == "shown":
            body = f"```\n{body.rstrip()}\n```\n"
        return match["head"] + textwrap.indent(body, match["indent"]) + match["tail"]

    try:
        section.text = _MARK.sub(made, text)
    except PageError as error:
        raise PageError(f"{page.name}: {error}") from error
    if understood != len(_ANY_MARK.findall(text)):
        raise PageError(f"{page.name}: a mark or its end is missing after {text[:60]!r}")
    return section


def made_page(page: Path) -> Made:
    """Make the marked places of a whole page anew."""
    whole = Made("")
    for text in sections(page):
        with tempfile.TemporaryDirectory() as folder:
            section = made_section(text, page, Terminal(Path(folder)))
        whole.text += section.text
        whole.pictures |= section.pictures
    return whole


def _value(kind: str, what: str, terminal: Terminal) -> str:
    source, *how = what.split(THEN)
    if kind == "result":
        return _of_result(results.load(source), how, what)
    text = terminal.run(source)
    for step in how:
        verb, _, argument = step.partition(" ")
        text = _cut(text, verb, argument, what)
    return text


def _cut(text: str, verb: str, argument: str, what: str) -> str:
    """Cut out a part of an output: from a line on, before a line, or what a pattern finds."""
    if verb == "find":
        if found := re.search(argument, text):
            return found[1]
    else:
        lines = text.splitlines(keepends=True)
        starts = [i for i, line in enumerate(lines) if line.startswith(argument)]
        if starts and verb == "from":
            return "".join(lines[starts[0] :])
        if starts and verb == "to":
            return "".join(lines[: starts[0]])
    raise PageError(f'"{what}": `{verb} {argument}` finds nothing in\n{text}')


def _of_result(result: results.Result, how: list[str], what: str) -> str:
    match [step.partition(" ")[::2] for step in how]:
        case [("table", name)] if name in result.tables:
            return f"\n{result.tables[name].markdown()}\n*{result.when()}*\n\n"
        case [("figure", name)] if name in result.figures:
            return str(result.figures[name])
        case [("origin", "")]:
            return result.origin()
        case [(over, place)] if over in results.OVER_COLUMNS and place.startswith("of "):
            name, _, column = place.removeprefix("of ").partition(": ")
            if name in result.tables:
                return result.tables[name].over(over, column)
    raise PageError(
        f'"{what}": ask for one `table NAME` of {list(result.tables)}, one `figure NAME` of '
        f"{list(result.figures)}, {list(results.OVER_COLUMNS)} `of TABLE: COLUMN`, or `origin`"
    )


def _image(body: str, what: str) -> str:
    if found := re.search(r"!\[[^]]*\]\(([^)]+\.svg)\)", body):
        return found[1]
    raise PageError(f'"{what}": there is no ![words](picture.svg) between the mark and its end')


def _picture(what: str, terminal: Terminal) -> str:
    """Draw an SVG file as it is now, with the hashes of its plan and of the code that drew it."""
    command, _, name = what.partition(THEN)
    terminal.run(command)
    plan = (terminal.folder / shlex.split(command)[1]).read_bytes()
    code = b"".join(
        path.read_bytes()
        for path in sorted((ROOT / "megatron_hetero" / "report" / "page").iterdir())
        if path.suffix in {".py", ".css"}
    )
    stamp = f"<!-- plan sha256 {_hash(plan)}, drawn by report/page sha256 {_hash(code)} -->\n"
    declaration, rest = (terminal.folder / name).read_text(encoding="utf-8").split("\n", 1)
    return f"{declaration}\n{stamp}{rest}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Emulate a terminal of 80 columns without colours."""
    changed = {"COLUMNS": "80", "NO_COLOR": "1"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def main(arguments: list[str] | None = None) -> int:
    """Write or check; status 1 where something was out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="default: all")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(arguments)
    work = [(page.resolve(), made_page) for page in options.pages or marked_pages()]
    if not options.pages:
        work += [(tool.PAGE, lambda _, tool=tool: Made(tool.page())) for tool in PRINTED]
    any_stale = False
    for page, make in work:
        made = make(page)
        for path in made.stale(page.read_text(encoding="utf-8"), page):
            any_stale = True
            print(f"{path.relative_to(ROOT)}: {'out of date' if options.check else 'refreshed'}")
            if not options.check:
                new = made.text if path == page else made.pictures[path]
                path.write_text(new, encoding="utf-8")
    return 1 if any_stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
