"""`megatron-hetero patch`: the hook in a Megatron-LM source tree's own `pretrain_gpt.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_hetero.cli.output import Output
from megatron_hetero.patching import tree as patching

DESCRIPTION = """\
Put the hook for asymmetric plans into a Megatron-LM source tree: its own
pretrain_gpt.py then takes --hetero-plan and --hetero-layout.  The tree is
recognised by hashes, and one that is not known is left as it is.  --revert gives
back the very bytes.  Without a patch, `python -m megatron_hetero.launch
pretrain_gpt.py …` does the same."""
TAKES_MEGATRON_FLAGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `patch`."""
    parser.add_argument("tree", type=Path, metavar="TREE", help="root of a Megatron-LM checkout")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check",
        dest="action",
        action="store_const",
        const="check",
        default="check",
        help="say which release it is and whether it is patched (default)",
    )
    action.add_argument(
        "--apply", dest="action", action="store_const", const="apply", help="put the hook in"
    )
    action.add_argument(
        "--revert", dest="action", action="store_const", const="revert", help="take it out"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Check, apply or revert; an unknown tree leaves through `MegatronVersionError` (5)."""
    tree = patching.recognise(arguments.tree)
    if arguments.action == "apply":
        patching.apply(tree)
    elif arguments.action == "revert":
        patching.revert(tree)
    # Read anew from the disk: what is there now, whatever was asked for.
    state = patching.recognise(arguments.tree).state
    if arguments.json:
        output.json(
            {
                "release": tree.release.release,
                "file": str(tree.path),
                "state": state,
                "changed": state != tree.state,
            }
        )
        return 0
    if arguments.action == "check":
        output.show(f"{tree.path}: that of {tree.release.carried_by}, {state}")
        if state == "unpatched":
            output.show("--apply would change:")
            output.show(patching.patch_text(tree.release))
    elif arguments.action == "apply":
        output.show(f"{tree.path}: patched. Train with its own flags and --hetero-plan plan.json")
    else:
        output.show(f"{tree.path}: as it was ({tree.release.release})")
    return 0
