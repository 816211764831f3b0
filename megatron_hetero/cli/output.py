"""Streams of a verb: text for people, one JSON object, errors and progress."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import IO, Any, Protocol, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from megatron_hetero.errors import BoundFaultWarning
from megatron_hetero.units import format_duration

COLOR_CHOICES = ("auto", "always", "never")
MAX_WIDTH = 100
MIN_TABLE_WIDTH = 80
"""Columns of a table at least: in a narrower one Rich drops whole columns and parts of numbers."""


_LONGEST_LINE = 8000
"""Characters of a line of an error; the longest of ours has some hundreds, and values of files."""


class Progress(Protocol):
    """Callback for the progress of the planner."""

    def __call__(
        self, incumbent_step_time_s: float | None, num_evaluated: int, bound_s: float = 0.0
    ) -> None: ...


SAID_EVERY_S = 30.0
"""Time between two lines of progress where output is not a terminal."""


class Output:
    """The streams of one command.

    Text for people goes to stdout, or to stderr when stdout carries the JSON object.  Markup in
    user's names is never interpreted.
    """

    def __init__(self, *, color: str = "auto", json_to_stdout: bool = False) -> None:
        self.color = color
        self._json_to_stdout = json_to_stdout
        self._errors = _console(sys.stderr, color)
        self._people = self._errors if json_to_stdout else _console(sys.stdout, color)

    def show(self, *renderables: RenderableType) -> None:
        """Show tables and text for people, wrapped to the terminal between words: a path or a
        command's option that is longer than a line stays whole, to be copied."""
        # Rich renders tables; lines of text are broken here, so that paths stay whole.
        width = self._people.width
        self._people.width = max(width, MIN_TABLE_WIDTH)
        with self._people.capture() as captured:
            for renderable in renderables:
                if isinstance(renderable, str):
                    self._people.print(_between_words(renderable, width), soft_wrap=True)
                else:
                    self._people.print(renderable)
        self._people.width = width
        # Tables are padded to the width of the terminal, which is in the way of copy and paste.
        lines = captured.get().splitlines()
        self._people.file.write("".join(f"{line.rstrip()}\n" for line in lines))
        self._people.file.flush()

    def verbatim(self, text: str) -> None:
        """Write text that is to be copied or piped: to stdout as it is, never wrapped or
        coloured."""
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()

    def json(self, data: Mapping[str, Any]) -> None:
        """Write the command's one JSON object."""
        self.verbatim(json.dumps(data, indent=2, allow_nan=False))

    def note(self, message: str) -> None:
        """Print a remark that is no result."""
        self._errors.print(Text.assemble(("note: ", "cyan"), message))

    def error(self, message: str) -> None:
        """Print why the command stops; the lines are kept as they are, carets point into them."""
        self._errors.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)

    def failed(self, kind: str, message: str, exit_code: int) -> int:
        """Print `error`, and a JSON object where the command promised one; return the exit code.

        Args:
            kind: the name of the error's class.
        """
        message = "\n".join(map(_cut, message.split("\n")))
        self.error(message)
        if self._json_to_stdout:
            self.json(error_object(kind, message, exit_code))
        return exit_code

    @contextmanager
    def own_warnings(self) -> Iterator[None]:
        """Show faults of this program that do not stop the command as lines of warning."""
        with warnings.catch_warnings():
            show_others = warnings.showwarning

            def show(
                message: Warning | str,
                category: type[Warning],
                filename: str,
                lineno: int,
                file: TextIO | None = None,
                line: str | None = None,
            ) -> None:
                # Warnings of other packages keep their own form.
                if issubclass(category, BoundFaultWarning):
                    self._errors.print(Text.assemble(("warning: ", "bold yellow"), str(message)))
                else:
                    show_others(message, category, filename, lineno, file, line)

            warnings.showwarning = show
            yield

    @contextmanager
    def progress(self, words: str) -> Iterator[Callable[[str], None]]:
        """Show a line of progress on stderr, in a pipe every half minute; the yielded call changes
        the words."""
        # A spinner in a log file would be a line for each frame.
        if not sys.stderr.isatty():
            with self._said_now_and_then(words) as change:
                yield change
            return
        with self._errors.status(words) as status:
            yield status.update

    @contextmanager
    def _said_now_and_then(self, words: str) -> Iterator[Callable[[str], None]]:
        """Say in a log what has been going on for half a minute, and again every half minute."""
        # A list holds the words, so that both functions see the change.
        current, is_done, started = [words], threading.Event(), time.monotonic()

        def say() -> None:
            # The wait ends at once when the work is done.
            while not is_done.wait(SAID_EVERY_S):
                self.note(f"{current[0]} ({time.monotonic() - started:.0f} s)")

        def change(words: str) -> None:
            current[0] = words

        thread = threading.Thread(target=say, daemon=True)
        thread.start()
        try:
            yield change
        finally:
            is_done.set()
            thread.join()

    @contextmanager
    def byte_progress(self, words: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar on stderr that follows bytes, while somebody is looking; the function yielded
        sets them."""
        # Nobody looks at a bar in a pipe.
        if not sys.stderr.isatty():
            yield lambda done: None
            return
        from rich import progress as bars

        columns = (
            bars.TextColumn(words), bars.BarColumn(), bars.DownloadColumn(),
            bars.TimeRemainingColumn(),
        )  # fmt: skip
        with bars.Progress(*columns, console=self._errors) as progress:
            task = progress.add_task(words, total=total)
            yield lambda done: progress.update(task, completed=done)

    @contextmanager
    def search_progress(self) -> Iterator[Progress]:
        """Show a line on stderr that follows a search, in a pipe every half minute."""
        with self.progress("searching") as say:

            def update(
                incumbent_step_time_s: float | None, num_evaluated: int, bound_s: float = 0.0
            ) -> None:
                best = (
                    "none yet"
                    if incumbent_step_time_s is None
                    else format_duration(incumbent_step_time_s)
                )
                gap = ""
                if incumbent_step_time_s is not None and bound_s > 0:
                    gap = f", gap at most {incumbent_step_time_s / bound_s - 1:.0%}"
                say(f"searching: {num_evaluated} plans, best step time {best}{gap}")

            yield update


def _cut(line: str) -> str:
    """Return a line of a message without the rest of a value that fills screens."""
    rest = len(line) - _LONGEST_LINE
    return line if rest <= 0 else f"{line[:_LONGEST_LINE]}... ({rest} more characters)"


def error_object(kind: str, message: str, exit_code: int) -> dict[str, Any]:
    """Return the object that `--json` prints in place of a result."""
    return {"error": {"class": kind, "message": message, "exit_code": exit_code}}


def wants_color(color: str, stream: IO[str]) -> bool:
    """Return whether `stream` gets colour: `--color` decides, else NO_COLOR, TERM and the
    terminal."""
    if color != "auto":
        return color == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def _between_words(words: str, width: int) -> str:
    """Break lines that are longer than the terminal, between words only."""
    lines = (
        textwrap.wrap(
            line, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
        )
        or [""]
        for line in words.splitlines() or [""]
    )
    return "\n".join(chain.from_iterable(lines))


def _console(stream: IO[str], color: str) -> Console:
    colored = wants_color(color, stream)
    # A pipe has no width, so that text is as wide as on a wide terminal.
    width = None if stream.isatty() or "COLUMNS" in os.environ else MAX_WIDTH
    console = Console(
        file=stream,
        width=width,
        force_terminal=colored or stream.isatty(),
        color_system="standard" if colored else None,
        markup=False,
        highlight=False,
        emoji=False,
    )
    console.width = min(console.width, MAX_WIDTH)
    return console
