"""Generate `model/flag_table.json` from the real parser of the installed Megatron.

Run it where megatron-core and torch are installed, after raising the supported Megatron version:

    python tools/make_flag_table.py            # rewrites the table
    python tools/make_flag_table.py --check    # exit 1 if the committed table is out of date
"""

from __future__ import annotations

import argparse
import enum
import importlib.metadata
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_hetero.files import read_json, write_json

TABLE_PATH = Path(__file__).parents[1] / "megatron_hetero" / "model" / "flag_table.json"

ACTIONS = {
    "_StoreAction": "store",
    "_StoreTrueAction": "store_true",
    "_StoreFalseAction": "store_false",
    "BooleanOptionalAction": "boolean",
}


def flag_table_data() -> dict[str, Any]:
    """Return the table as JSON data: the Megatron version and every flag, sorted by first name."""
    import_module("megatron_hetero.runtime")  # hides a Transformer Engine without its library
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = [flag_data(action) for action in parser._actions if action.dest != "help"]
    return {
        "megatron_core_version": importlib.metadata.version("megatron-core"),
        "flags": sorted(flags, key=lambda flag: flag["names"][0]),
    }


def flag_data(action: argparse.Action) -> dict[str, Any]:
    """Describe one flag; what is None (and a missing default) is left out."""
    data: dict[str, Any] = {
        "names": list(action.option_strings),
        "dest": action.dest,
        "action": ACTIONS[type(action).__name__],
        "nargs": action.nargs,
        "type": getattr(action.type, "__name__", None),
        "choices": None if action.choices is None else [plain(c) for c in action.choices],
        "default": plain(action.default),
        "help": first_sentence(action.help or ""),
    }
    return {key: value for key, value in data.items() if value is not None}


def plain(value: Any) -> Any:
    """Return a default or choice as it is typed on the command line; None where JSON cannot say
    it."""
    if isinstance(value, enum.Enum):
        return value.name
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return value


def first_sentence(text: str) -> str:
    joined = " ".join(text.replace("%%", "%").split())
    return re.split(r"(?<=[.!?]) (?=[A-Z])", joined, maxsplit=1)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the table of Megatron's flags.")
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    check = parser.parse_args().check
    data = flag_table_data()
    if not check:
        write_json(TABLE_PATH, data)
        print(f"{TABLE_PATH}: {len(data['flags'])} flags of {data['megatron_core_version']}")
        return 0
    if read_json(TABLE_PATH).data != data:
        print(f"{TABLE_PATH} is out of date; run tools/make_flag_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
