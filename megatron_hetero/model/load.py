"""A `Workload` from what a user has: a training script, a file of flags, a Hugging Face config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_hetero.errors import ModelError
from megatron_hetero.files import content_hash, read_json, read_text
from megatron_hetero.model.arguments import (
    COMMAND_LINE,
    Argument,
    command_line_words,
    group_arguments,
    merge_arguments,
)
from megatron_hetero.model.huggingface import megatron_words_from_huggingface
from megatron_hetero.model.megatron_flags import workload_from_arguments
from megatron_hetero.model.script import Word, read_megatron_words
from megatron_hetero.model.spec import Workload


def load_workload(
    path: Path | str | None, megatron_args: Sequence[str] = (), is_planned: bool = True
) -> Workload:
    """Read the model and the training job.

    Args:
        path: a bash script that starts Megatron, a file of Megatron flags, or (`.json`) a Hugging
            Face `config.json`; None when `megatron_args` say it all.
        megatron_args: flags that the user typed; each beats the file's.
        is_planned: what the cost model knows nothing of is refused.
    Raises:
        FileFormatError: the file cannot be read or is malformed.
        ModelError: a flag that the model needs is missing, malformed or impossible.
        UnsupportedError: a flag or model that cannot be planned yet.
        UsageError: a typed flag is the plan's to decide (TP, PP, layout).
    """
    source, arguments = load_arguments(path, megatron_args)
    takes_flags = path is None or Path(path).suffix != ".json"
    return workload_from_arguments(arguments, source, takes_flags, is_planned)


def load_arguments(
    path: Path | str | None, megatron_args: Sequence[str] = ()
) -> tuple[str, tuple[Argument, ...]]:
    """Read the name of the source and its arguments, from which `load_workload` starts.

    Raises:
        FileFormatError, ModelError, UsageError: as there, but nothing that is missing.
    """
    source, words = COMMAND_LINE, tuple[Word, ...]()
    if path is not None:
        source, words = _read(Path(path))
    typed = group_arguments(command_line_words(megatron_args))
    return source, merge_arguments(group_arguments(words), typed)


def workload_hash(workload: Workload) -> str:
    """Hash (sha256) the model, the training and the flags; not the place where they were read."""
    return content_hash(
        {
            "model": asdict(workload.model),
            "training": asdict(workload.training),
            "megatron_args": list(workload.megatron_args),
        }
    )


def _read(path: Path) -> tuple[str, tuple[Word, ...]]:
    """Read the name of a source and its Megatron words."""
    if path.suffix == ".json":
        return megatron_words_from_huggingface(read_json(path))
    if path.suffix in (".yaml", ".yml"):
        raise ModelError(
            f"{path}: a model is read from a bash script, a file of Megatron flags or a Hugging "
            "Face config.json, not from YAML"
        )
    return str(path), read_megatron_words(path, read_text(path))
