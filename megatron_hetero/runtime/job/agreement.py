"""Everything that must be equal on all ranks of a job, in comparable words.

Every machine has its own command line and its own copy of the plan.  Ranks that differ in either
would train another model than the one asked for, or wait for one another for ever.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import megatron_hetero
from megatron_hetero.errors import some_of
from megatron_hetero.files import content_hash, read_json, read_yaml
from megatron_hetero.model.flag_table import Option, flag_table, last_of_each
from megatron_hetero.plan.file import plan_to_data
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan

if TYPE_CHECKING:
    from megatron_hetero.runtime.job.arguments import HeteroArguments

_PATHS = (
    "--data-path --train-data-path --valid-data-path --test-data-path --data-args-path "
    "--per-split-data-args-path --data-cache-path --per-dataset-sequences-path "
    "--object-storage-cache-path --vocab-file --merge-file --tokenizer-model --save --load "
    "--pretrained-checkpoint --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-dir "
    "--tensorboard-dir --wandb-save-dir --memory-snapshot-path --config-logger-dir "
    "--nccl-communicator-config-path --flight-recorder-dump-path "
    "--result-rejected-tracker-filename --tokenizer-metadata"
)
PATHS = frozenset(_PATHS.split())
"""Flags whose values are places in a file system: machines may mount a disk where they like.

All ranks must give such a flag or none, with equally many values and with equal numbers among them
(weights of data)."""

_OWN = (
    "--local-rank --num-workers --num-dataset-builder-threads --straggler-ctrlr-port "
    "--logging-level --hetero-drill --hetero-timeline"
)
MAY_DIFFER = frozenset(_OWN.split())
"""Flags in which the ranks of a job may differ."""

_PLACE = "(a path)"
_SHOWN = 160


def agreed_items(plan: Plan | None, arguments: HeteroArguments) -> dict[str, str]:
    """Return what must be equal on all ranks: name -> value.

    Args:
        plan: the plan; None for a job of stock Megatron's own.
        arguments: the command line.
    Raises:
        HeteroError: a file that the command line names cannot be read.
    """
    items = {f"version of {name}": text for name, text in agreed_versions().items()}
    items |= flag_items(arguments.megatron)
    items |= dict(_own_flags(arguments))
    # Machines may have these files at other places, so their contents count.
    for name, file in (("cluster", arguments.cluster), ("profile", arguments.profile)):
        if file is not None:
            read = read_json if file.suffix == ".json" else read_yaml
            items[f"content of --hetero-{name}"] = content_hash(read(file).data)[:16]
    if plan is not None:
        items["layout of the plan"] = format_layout(plan.layout)
        for section, data in plan_to_data(plan).items():
            items[f"{section} of the plan"] = content_hash(data)[:16]
    return items


def flag_items(megatron: Sequence[str]) -> dict[str, str]:
    """Return the flags that change a job, by first names; defaults and order do not count.

    Flags that Megatron does not know, a script's own, count as they stand.
    """
    table = flag_table()
    known = table.known_part(megatron)
    items = {}
    for option in last_of_each(table.split(known)):
        name = option.flag.names[0]
        if name in MAY_DIFFER or _is_default(option):
            continue
        words = [_word(value, name in PATHS) for value in option.values]
        # Two flags may set one value: the name that was given says to which.
        items[name] = " ".join(words) or option.name
    rest = _without(megatron, known)
    if rest:
        items["further flags"] = " ".join(rest)
    return items


def _is_default(option: Option) -> bool:
    default = option.flag.default
    if not option.values or default is None:
        return False
    wanted = default if isinstance(default, tuple) else (default,)
    return [_word(v, False) for v in option.values] == [_word(str(v), False) for v in wanted]


def _word(value: str, is_place: bool) -> str:
    """Return a value in one spelling: 1e-3 and 0.001 are one number."""
    try:
        return repr(float(value))
    except ValueError:
        return _PLACE if is_place else value


def _without(argv: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return `argv` without the tokens of its subsequence `known`."""
    rest, at = [], 0
    for token in argv:
        if at < len(known) and token == known[at]:
            at += 1
        else:
            rest.append(token)
    return rest


def _own_flags(arguments: HeteroArguments) -> Iterator[tuple[str, str]]:
    faults = arguments.faults
    yield "--hetero-init", arguments.init
    yield "--hetero-sequences", str(arguments.sequences)
    yield "--hetero-keep-checkpoints", str(faults.keep_checkpoints)
    yield "--hetero-stall-limit", repr(float(faults.stall_limit_s))
    yield "--hetero-on-loss", "replan" if faults.is_replanned else "stop"


@cache
def agreed_versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks, this package's with a hash of the code.
    """
    found = {"megatron_hetero": f"{megatron_hetero.__version__} (source {_source_hash()})"}
    for name in ("megatron-core", "torch"):
        try:
            # Cards of unlike age need builds for unlike CUDA ("+cu126"), which compute the same.
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "a source tree"
    return found


def _source_hash() -> str:
    """Return a hash of this package's code: clones of one version may differ."""
    root = Path(megatron_hetero.__file__).parent
    total = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        total.update(f"{file.relative_to(root)}\0".encode())
        total.update(file.read_bytes())
    return total.hexdigest()[:12]


def disagreement(items: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]) -> str:
    """Describe what differs: one line for each item, with the ranks and their values.

    The value that most ranks have comes last; of equally many, the one of the lowest rank.

    Args:
        items: by rank, as `agreed_items` returns them.
        hosts: name of each rank's machine.
    """
    lines = []
    for name in dict.fromkeys(name for own in items.values() for name in own):
        ranks: dict[str | None, list[int]] = defaultdict(list)
        for rank, own in sorted(items.items()):
            ranks[own.get(name)].append(rank)
        if len(ranks) == 1:
            continue
        # The rarest value comes first: it is the likely mistake.
        groups = sorted(ranks.items(), key=lambda group: (len(group[1]), -group[1][0]))
        texts = _excerpts([value for value, _ in groups])
        said = [f"{_ranks(r, hosts)}: {t}" for t, (_, r) in zip(texts, groups, strict=True)]
        lines.append(f"{name}: " + "; ".join(said))
    if any(line.startswith("layout of the plan") for line in lines):
        # The layout says it in words; the sections of the file differ along with it.
        lines = [line for line in lines if not line.partition(":")[0].endswith(" of the plan")
                 or line.startswith("layout")]  # fmt: skip
    return some_of(lines, "\n  ")


def _ranks(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} on {hosts[ranks[0]]}"
    return f"ranks {some_of([str(rank) for rank in ranks])}"


def _excerpts(values: Sequence[str | None]) -> list[str]:
    """Return values cut to a line's length, from just before the first difference."""
    texts = [value for value in values if value is not None]
    # Length of the beginning that all values share.
    same = 0
    while len(texts) > 1 and len({t[same : same + 1] for t in texts}) == 1:
        same += 1
    longest = max(map(len, texts), default=0)
    # A little of the shared beginning shows where the difference is.
    start = max(0, same - 20) if longest > _SHOWN else 0
    return ["not given" if v is None else ("... " if start else "") + v[start : start + _SHOWN]
            for v in values]  # fmt: skip
