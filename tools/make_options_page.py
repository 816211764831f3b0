"""Print `docs/options.md` from the parsers of the verbs and of the training entry.

python tools/make_options_page.py            # rewrites the page
python tools/make_options_page.py --check    # exit 1 if the page is out of date
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_hetero.cli.main import VERBS
from megatron_hetero.runtime.job.arguments import add_hetero_arguments

PAGE = Path(__file__).parents[1] / "docs" / "options.md"


def page() -> str:
    """Write the page as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Every option"
    yield ""
    yield (
        "What each verb takes beside Megatron's own flags, and what a training job takes. "
        "Printed by `tools/make_options_page.py`; [command-line.md](command-line.md) has what the "
        "verbs are for. All verbs take `--color auto|always|never` and `--help`."
    )
    for verb, summary in VERBS.items():
        module = importlib.import_module(f"megatron_hetero.cli.{verb.replace('-', '_')}")
        yield from ("", f"## {verb}", "", f"{summary[0].upper()}{summary[1:]}.")
        if module.TAKES_MEGATRON_FLAGS:
            yield "Takes Megatron's flags too, among its own or after `--`."
        yield ""
        parser = argparse.ArgumentParser(prog=verb, add_help=False)
        module.add_arguments(parser)
        yield from _table(parser)
    yield from ("", "## In a training job", "")
    yield (
        "Flags of `python -m megatron_hetero.pretrain_gpt` and of scripts with the hook, beside "
        "Megatron's."
    )
    yield ""
    yield from _table(add_hetero_arguments(argparse.ArgumentParser(add_help=False)))


def _table(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Write one row an argument; arguments of a sub-command have its name before them."""
    yield from ("| argument | |", "| --- | --- |")
    yield from _rows(parser, "")


def _rows(parser: argparse.ArgumentParser, prefix: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _rows(child, f"{prefix}{name} ")
            continue
        if action.help == argparse.SUPPRESS:
            continue
        yield f"| `{prefix}{_spelled(action)}` | {_meaning(action)} |".replace("\n", " ")


def _spelled(action: argparse.Action) -> str:
    """Write an argument as it is typed: names, then what follows them."""
    value = action.metavar
    if value is None and action.choices is not None:
        value = "{" + ",".join(str(choice) for choice in action.choices) + "}"
    if value is None:
        value = action.dest.upper() if action.option_strings else action.dest
    word = value if isinstance(value, str) else " ".join(value)
    if action.nargs in ("*", "+"):
        word += " ..."
    if not action.option_strings:
        return word.replace("|", "\\|")
    names = ", ".join(action.option_strings)
    return (names if action.nargs == 0 else f"{names} {word}").replace("|", "\\|")


def _meaning(action: argparse.Action) -> str:
    """Write the help text, its `%(...)s` filled in as argparse does."""
    fields = {**vars(action), "prog": "megatron-hetero"}
    if action.choices is not None:
        fields["choices"] = ", ".join(str(choice) for choice in action.choices)
    text = (action.help or "") % fields
    # Else typographers make one dash of two.
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![\w-])(--[\w-]+)", r"`\1`", part) for part in parts[::2]]
    text = "`".join(parts)
    required = "(required)" if action.option_strings and action.required else ""
    return f"{text} {required}".strip().replace("|", "\\|")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from printed_page import write_or_check

    raise SystemExit(write_or_check(PAGE, page, "make_options_page.py", __doc__.splitlines()[0]))
