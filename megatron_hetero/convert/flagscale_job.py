"""A FlagScale experiment (Hydra YAML) as a Megatron job, with the keys that have no counterpart.

FlagScale hands `train.system`, `train.model` and `train.data` to Megatron's parser: keys become
flags, nested mappings are flattened, and of a flag that comes twice the last value counts
(`_get_args_megatron` and `flatten_dict_to_args` of its `runner`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hetero.convert.hydra import Experiment, Tree, Value, read_experiment
from megatron_hetero.errors import FileFormatError, UsageError
from megatron_hetero.model.arguments import PLAN_FLAGS, Argument
from megatron_hetero.model.flag_table import Option, flag_table
from megatron_hetero.model.shell.values import Word

_PARTS = ("system", "model", "data")
_RUNNERS_OWN = {"log_dir", "details_dir", "scripts_dir", "pids_dir"}
_LAYOUT = PLAN_FLAGS | {
    "--enable-hetero",
    "--hetero-process-meshes",
    "--hetero-pipeline-layer-split",
    "--recompute-granularity-per-stage-micro-batch",
    "--recompute-method-per-stage-micro-batch",
    "--recompute-num-layers-per-stage-micro-batch",
}
"""Flags that `flagscale.from_flagscale` turns into the layout and the stages' recompute."""
_FOLDERS = {
    "--save": "checkpoints",
    "--load": "checkpoints",
    "--tensorboard-dir": "tensorboard",
    "--wandb-save-dir": "wandb",
}
"""Folders of FlagScale's runner below `experiment.exp_dir`, if the file does not say."""

_TOKENIZER = "a tokenizer of FlagScale's own; give Megatron's --tokenizer-type, --tokenizer-model"
_WHY: Mapping[str, str] = {
    "--hetero-device-types": "the cluster file names the GPUs of each node",
    "--hetero-current-device-type": "the cluster file names the GPUs of each node",
    "--norm-init-weight": "norms start at 1 in Megatron: the training differs",
    "--skip-iters-range": "these steps are taken: the training differs",
    "--skip-samples-range": "these samples are trained on: the training differs",
    "--auto-skip-spiky-loss": "steps with such a loss are taken: the training differs",
    "--spiky-loss-threshold": "steps with such a loss are taken: the training differs",
    "--tokenizer-path": _TOKENIZER,
    "--special-tokens-file": _TOKENIZER,
    "--legacy-tokenizer": _TOKENIZER,
}
_WHY_ELSEWHERE: Mapping[str, str] = {
    "experiment.envs": "`launch` writes what each kind of GPU needs; export the rest yourself",
    "experiment.cmds": "commands are not taken over; run them before train.sh",
    "experiment.shell_cmds": "commands are not taken over; run them before train.sh",
    "experiment.runner": "`launch --for` chooses how the nodes are started",
    "experiment.auto_tuner": "its search is `megatron-hetero plan`",
}
_USED_ELSEWHERE = frozenset(
    {
        "experiment.exp_dir",
        "experiment.exp_name",
        "experiment.runner.nproc_per_node",
        "experiment.envs.CUDA_VISIBLE_DEVICES",
        "experiment.envs.CUDA_DEVICE_MAX_CONNECTIONS",
    }
)


@dataclass(frozen=True)
class LeftOut:
    """A key without counterpart: its place, its value, and the reason or the remedy."""

    key: str
    where: str
    value: str
    why: str


@dataclass(frozen=True)
class FlagScaleJob:
    """The content of an experiment.

    `arguments`: all flags, FlagScale's own too, for `GivenFlags`; `options`: those that Megatron
    takes, without the layout; `gpus_per_node`: of the runner, None where it does not say.
    """

    path: Path
    arguments: tuple[Argument, ...]
    options: tuple[Option, ...]
    left_out: tuple[LeftOut, ...]
    device_types: tuple[str, ...]
    gpus_per_node: int | None

    @property
    def script(self) -> str:
        """Write a script of the job for `plan --model`: Megatron's flags, and comments of the
        rest."""
        lines = [
            "#!/usr/bin/env bash",
            f"# FlagScale's {self.path.name} in Megatron's flags; the layout is the plan's.",
            "#",
            *(f"# left out: {left.key} = {left.value}: {left.why}" for left in self.left_out),
            "torchrun pretrain_gpt.py \\",
        ]
        flags = [f"    {shlex.join(option.tokens)}" for option in self.options]
        return "\n".join(lines) + "\n" + " \\\n".join(flags) + "\n"

    @property
    def megatron_args(self) -> tuple[str, ...]:
        """Return the options as one argument vector."""
        return tuple(token for option in self.options for token in option.tokens)


def read_flagscale_job(path: Path, typed: Sequence[Argument] = ()) -> FlagScaleJob:
    """Read an experiment file of FlagScale, or a file of its `train` folder.

    Args:
        typed: flags of the user's, which beat the file's.
    Raises:
        FileFormatError: not such a file, or a value that is none for Megatron's flag of that name.
        UnsupportedError: a form of Hydra's files that is not read.
    """
    # The experiment, or a file that is the `train` part itself.
    experiment = read_experiment(path)
    tree = experiment.tree
    train = tree.branch("train")
    prefix = "train."
    if not train.entries and tree.branch("model").entries:
        train, prefix = tree, ""
    if not train.branch("model").entries:
        raise FileFormatError(
            f"{path}:1: no experiment of FlagScale: it has train (with system, model, data), "
            "usually by `defaults: [train: NAME]`"
        )
    # Flags of the experiment, where a later key replaces an earlier one; typed flags beat both.
    keys: dict[str, str] = {}
    found: dict[str, Argument] = {}
    for key, argument in _arguments(train, prefix):
        found.pop(argument.flag, None)
        found[argument.flag] = argument
        keys[argument.flag] = key
    for argument in _folders(tree):
        if argument.flag not in found:
            found[argument.flag] = argument
            keys[argument.flag] = "experiment.exp_dir"
    found.update({argument.flag: argument for argument in typed})
    # Settings that these flags cannot say are left out, with the reason.
    left_out = [*_other_checkpoints(found, keys, typed)]
    options = [*_mlp_columns(found), *_options(found.values(), keys, left_out)]
    left_out += _elsewhere(experiment, prefix)
    return FlagScaleJob(
        path,
        tuple(found.values()),
        tuple(options),
        tuple(left_out),
        _words(found.get("--hetero-device-types")),
        _gpus_per_node(tree),
    )


def _other_checkpoints(
    found: dict[str, Argument], keys: Mapping[str, str], typed: Sequence[Argument]
) -> Iterator[LeftOut]:
    """Take out a form of checkpoints that no job with unlike stages can write."""
    flag, form = "--ckpt-format", "torch_dist"
    argument = found.get(flag)
    # What the user types is taken at the user's word.
    if argument is None or _words(argument) == (form,) or flag in {a.flag for a in typed}:
        return
    del found[flag]
    why = f"unlike stages are refused with it; checkpoints are {form}, which any layout reads"
    yield LeftOut(keys[flag], argument.where, json.dumps(" ".join(_words(argument))), why)


def _arguments(train: Tree, prefix: str) -> Iterator[tuple[str, Argument]]:
    """Yield flags with their keys, flattened as FlagScale flattens keys: a later part replaces the
    keys of an earlier part."""
    merged = Tree()
    first_part: dict[str, str] = {}
    # A later part replaces a key's value and part; the key keeps its place in the order.
    for part in _PARTS:
        for name, entry in train.branch(part).entries.items():
            merged.entries[name] = entry
            first_part[name] = part
    for name, entry in merged.entries.items():
        leaves = entry.leaves(name) if isinstance(entry, Tree) else iter([(name, entry)])
        for key, value in leaves:
            last = key.rpartition(".")[2]
            # Null says that nothing is set; False that a switch is off.
            if last in _RUNNERS_OWN or value.data is None or value.data is False:
                continue
            yield f"{prefix}{first_part[name]}.{key}", _argument(last, value)


def _argument(name: str, value: Value) -> Argument:
    # A switch has no values; a list has several.
    items = value.data if isinstance(value.data, list) else [value.data]
    words = () if value.data is True else tuple(Word(str(i), value.where) for i in items)
    return Argument(f"--{name.replace('_', '-')}", words, value.where, value.reason)


def _folders(tree: Tree) -> Iterator[Argument]:
    """Yield the flags that FlagScale's runner adds: folders below `exp_dir`."""
    base = tree.find("experiment.exp_dir")
    if isinstance(base, Value) and isinstance(base.data, str):
        for flag, folder in _FOLDERS.items():
            word = Word(f"{base.data.rstrip('/')}/{folder}", base.where)
            yield Argument(flag, (word,), base.where, base.reason)


def _mlp_columns(found: Mapping[str, Argument]) -> Iterator[Option]:
    """Convert `multiple_of` and `hidden_dim_multiplier` to FlagScale's width of the MLP."""
    wanted = ("--multiple-of", "--swiglu", "--hidden-size")
    if "--ffn-hidden-size" in found or any(flag not in found for flag in wanted):
        return
    multiple = int(_number(found["--multiple-of"]))
    # FlagScale's rule: two thirds of four times the hidden size, rounded up to the multiple.
    columns = int(4 * int(_number(found["--hidden-size"])) * 2 / 3)
    if "--hidden-dim-multiplier" in found:
        columns = int(columns * _number(found["--hidden-dim-multiplier"]))
    if multiple < 1 or columns < 1:
        raise FileFormatError(f"{found['--multiple-of'].where}: multiple_of: numbers above 0")
    columns = multiple * ((columns + multiple - 1) // multiple)
    yield flag_table().option("--ffn-hidden-size", str(columns))


def _number(argument: Argument) -> float:
    try:
        return float(" ".join(_words(argument)))
    except ValueError:
        words = " ".join(_words(argument))
        raise FileFormatError(
            f"{argument.where}: {argument.flag[2:].replace('-', '_')} is {words!r}; a number is "
            "wanted"
        ) from None


def _words(argument: Argument | None) -> tuple[str, ...]:
    return argument.words[1:] if argument is not None and argument.words is not None else ()


def _options(
    arguments: Iterable[Argument], keys: Mapping[str, str], left_out: list[LeftOut]
) -> Iterator[Option]:
    """Yield the options that Megatron takes; append the others to `left_out`."""
    table = flag_table()
    for argument in arguments:
        flag = argument.flag
        words = argument.words
        # The layout and the MLP's width are converted elsewhere.
        if flag in _LAYOUT or flag in ("--multiple-of", "--hidden-dim-multiplier"):
            continue
        # Unknown value, unknown flag, or a value that Megatron does not take.
        if words is None:
            why = f"{argument.reason}; give {flag} after --"
        elif flag not in table.by_name:
            why = _WHY.get(flag, f"Megatron {table.megatron_core_version} has no such flag")
        else:
            try:
                yield table.option(flag, *words[1:])
                continue
            except UsageError as error:
                own = flag == "--tokenizer-type"
                why = _TOKENIZER if own else f"{error} Give another after --"
        said = [value.text or "" for value in argument.values]
        shown = json.dumps(said[0] if len(said) == 1 else said or True)
        left_out.append(LeftOut(keys.get(flag, flag), argument.where, shown, why))


def _elsewhere(experiment: Experiment, prefix: str) -> Iterator[LeftOut]:
    """Yield the keys outside `train`: FlagScale's own, but for those that were taken over."""
    for key, value in experiment.tree.leaves():
        # What the options have, what is empty, and what others refer to, is not left out.
        is_train = key.startswith("train.") if prefix else key.split(".")[0] in _PARTS
        unsaid = value.data is None or value.data in ("", [])
        if is_train or unsaid or key in experiment.referred or key in _USED_ELSEWHERE:
            continue
        why = next(
            (why for start, why in _WHY_ELSEWHERE.items() if f"{key}.".startswith(f"{start}.")),
            "FlagScale's own",
        )
        yield LeftOut(key, value.where, json.dumps(value.data), why)


def _gpus_per_node(tree: Tree) -> int | None:
    given = tree.find("experiment.runner.nproc_per_node")
    if isinstance(given, Value) and isinstance(given.data, int) and given.data > 0:
        return given.data
    # Without a number of processes the visible GPUs say it.
    visible = tree.find("experiment.envs.CUDA_VISIBLE_DEVICES")
    if isinstance(visible, Value) and visible.data is not None and not visible.reason:
        return len(str(visible.data).split(","))
    return None
