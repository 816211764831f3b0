"""A `Workload` from what a user has: a training script, a file of flags, a Hugging Face config."""

from __future__ import annotations

import os.path
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from megatron_hetero.errors import ModelError, UsageError
from megatron_hetero.files import content_hash, read_json, read_text
from megatron_hetero.model.arguments import (
    COMMAND_LINE,
    JobText,
    command_line_words,
    dropped_holes,
    group_arguments,
    leading_holes,
    merge_arguments,
)
from megatron_hetero.model.megatron_flags import workload_from_arguments
from megatron_hetero.model.script import read_script
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.tokenizer import vocabulary_of_folder
from megatron_hetero.model.training import unset_fields


def load_workload(
    path: Path | str | None,
    megatron_args: Sequence[str] = (),
    is_planned: bool = True,
    environment: Mapping[str, str | None] | None = None,
) -> Workload:
    """Read the model and the training job.

    Args:
        path: a bash script that starts Megatron, a file of Megatron flags, a Hugging Face
            `config.json` (any `.json`), or the folder of a model with one; None when
            `megatron_args` say it all.  A script's arguments may follow its name, as in
            `run.sh 8B 1`.
        megatron_args: flags that the user typed; each beats the file's.
        is_planned: what the cost model knows nothing of is refused.
        environment: variables with which a script is started; None for one that is not set.
    Raises:
        FileFormatError: the file cannot be read or is malformed.
        ModelError: a flag that the model needs is missing, malformed or impossible.
        UnsupportedError: a flag or model that cannot be planned yet.
        UsageError: a typed flag is the plan's to decide (TP, PP, layout).
    """
    return workload_from_arguments(load_arguments(path, megatron_args, environment), is_planned)


def load_arguments(
    path: Path | str | None,
    megatron_args: Sequence[str] = (),
    environment: Mapping[str, str | None] | None = None,
) -> JobText:
    """Read the arguments and source that `load_workload` starts from.

    Raises:
        FileFormatError, ModelError, UsageError: as there, but nothing that is missing.
    """
    file = None if path is None else _with_arguments(Path(path))[0]
    if environment and (file is None or os.path.isdir(file) or file.suffix == ".json"):
        what = "no script was given" if file is None else f"{file} is no script"
        raise UsageError(f"--model-env is what a script of --model is started with, and {what}")
    # The file gives the flags, and words typed after `--` override those.
    read = JobText(COMMAND_LINE, ()) if path is None else _read(Path(path), environment or {})
    typed = group_arguments(command_line_words(megatron_args))
    merged = merge_arguments(read.arguments, typed)
    # What a dropped flag had hidden behind its values may still be flags, and is named.
    unread = (*read.unread, *dropped_holes(read.arguments, merged))
    return replace(read, arguments=merged, unread=unread)


def workload_hash(workload: Workload) -> str:
    """Hash (sha256) the model, the training and the flags; not the place where they were read, nor
    settings that plan.json leaves out, so that a setting added to either changes no hash."""
    unset = {"model": unset_fields(workload.model), "training": unset_fields(workload.training)}
    whole = {"model": asdict(workload.model), "training": asdict(workload.training)}
    hashed: dict[str, object] = {
        name: {key: own for key, own in data.items() if key not in unset[name]}
        for name, data in whole.items()
    }
    return content_hash({**hashed, "megatron_args": list(workload.megatron_args)})


def _read(path: Path, environment: Mapping[str, str | None]) -> JobText:
    # A command in the place of its file may be longer than a name can be.
    if os.path.isdir(path):
        return _read_folder(path)
    path, arguments = _with_arguments(path)
    # Any JSON is a model of Hugging Face's; the job's own flags then have to be typed.
    if path.suffix == ".json":
        # Its schema takes a noticeable moment to build, and few jobs come as a config.json.
        from megatron_hetero.model.huggingface import megatron_words_from_huggingface

        source, words = megatron_words_from_huggingface(read_json(path))
        return JobText(source, group_arguments(words), takes_flags=False)
    if path.suffix in (".yaml", ".yml"):
        raise ModelError(
            f"{path}: a model is read from a bash script, a file of Megatron flags or a Hugging "
            "Face config.json, not from YAML; a file of machines goes with --cluster, are the two "
            "swapped?"
        )
    script = read_script(path, read_text(path), arguments, environment)
    # Unknown words before the first flag belong to no flag, and may hold some.
    unread = (*leading_holes(script.words), *script.unread)
    return JobText(str(path), group_arguments(script.words), True, unread, script.exports)


def _read_folder(folder: Path) -> JobText:
    """Read the folder of a Hugging Face model: its `config.json`, and the number of its tokens."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(
            f"{folder}: a folder is read as a Hugging Face model, and this one has no config.json; "
            "name a script, a file of Megatron flags or a config.json"
        )
    # The folder's tokenizer is counted as a check on `vocab_size`, which may be padded.
    job = _read(config, {})
    vocabulary = vocabulary_of_folder(folder)
    if vocabulary is None:
        return job
    # A translated config has exactly one such flag.
    (rows,) = (a for a in job.arguments if a.flag == "--vocab-size")
    num_rows = int(rows.values[0].text or "0")
    # A tokenizer with more tokens than rows would index beyond the embedding.
    if vocabulary.size > num_rows:
        raise ModelError(
            f"{rows.where}: vocab_size is {num_rows}, and the tokenizer beside it has "
            f"{vocabulary.size} tokens ({vocabulary.note}); correct vocab_size"
        )
    note = f"its tokenizer has {vocabulary.size} tokens, the embedding {num_rows} rows"
    return replace(job, source=f"{job.source} ({note})")


def _with_arguments(path: Path) -> tuple[Path, list[str]]:
    """Split `run.sh 8B 1` into a script and its arguments, unless a file is called so."""
    text = str(path)
    # A file whose name has blanks is meant as it is.
    if " " not in text or os.path.exists(path):
        return path, []
    try:
        first, *rest = shlex.split(text)
    except ValueError as error:
        raise ModelError(f"{text}: {error}; quote the script's arguments as for a shell") from None
    # Without such a file the error names the whole text as the file that is missing.
    return (Path(first), rest) if os.path.exists(first) else (path, [])
