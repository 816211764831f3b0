"""Rules that refuse flags: read by the start, and by whatever makes flags of a plan.

A condition reads arguments by the names of Megatron's parser. At the start they are the parsed
ones; before the start `given_arguments` has the same names, with the values of a job's flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.model.flag_table import Option, flag_table

Rule = tuple[str, Callable[[Any], bool], str]
"""(flag as the user knows it, condition on the arguments, advice)."""


def refuse(rules: Sequence[Rule], args: Any, heading: str) -> None:
    """Refuse flags by rules.

    Args:
        rules: flags, conditions and advice.
        args: Megatron's parsed arguments, or `given_arguments`.
        heading: first line of the message.
    Raises:
        UnsupportedError: the message names every flag whose condition holds.
    """
    found = [f"{flag}: {instead}" for flag, asks, instead in rules if asks(args)]
    if found:
        raise UnsupportedError("\n  ".join([heading, *found]))


def given_arguments(options: Iterable[Option]) -> SimpleNamespace:
    """Return the values that Megatron's parser has for some flags, by argparse's destinations.

    Values of other types than numbers and words stay words, and a default that JSON cannot say is
    None: conditions ask for no more than whether such a flag is given.

    Args:
        options: one occurrence of each flag at most.
    """
    values: dict[str, Any] = {}
    # Defaults first; of several flags with one destination argparse takes the first's.
    for flag in flag_table().flags:
        default = list(flag.default) if isinstance(flag.default, tuple) else flag.default
        values.setdefault(flag.dest, default)
    for option in options:
        values[option.flag.dest] = _value(option)
    # `parse_args` turns the older flag into this granularity.
    if values["recompute_activations"]:
        values["recompute_granularity"] = "selective"
    return SimpleNamespace(**values)


def _value(option: Option) -> Any:
    flag = option.flag
    # Flags without values; of a pair, the second name begins with `--no-`.
    if flag.action != "store":
        is_on = flag.action == "store_true" or not option.name.startswith("--no-")
        return is_on and flag.action != "store_false"
    convert = {"int": int, "float": float}.get(str(flag.type), str)
    found = [convert(value) for value in option.values]
    return found[0] if flag.nargs is None else found


def is_packed(args: Any) -> bool:
    """Tell if the job's batches say where documents begin."""
    return bool(args.sft or args.dataloader_inter_document_masking)


def reports_logits(args: Any) -> bool:
    """Tell if a job reads the largest attention logits."""
    return bool(args.qk_clip or args.log_max_attention_logit)
