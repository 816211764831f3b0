"""A Hugging Face model folder: `config.json` and weights in safetensors files.

Only safetensors are read: plain tensors with a JSON header, nothing that could run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_hetero.errors import CheckpointError
from megatron_hetero.files import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FILE_BYTES = 4 << 30


class WeightFolder:
    """Tensors of a folder by name, read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Find the file of each tensor.

        Raises:
            CheckpointError: there are no safetensors, or an index names a file that is missing.
        """
        self._folder = folder
        self._file_of = self._find()
        self._read: set[str] = set()

    def _find(self) -> Mapping[str, str]:
        if (self._folder / INDEX).is_file():
            data = read_json(self._folder / INDEX).data
            named = data.get("weight_map") if isinstance(data, dict) else None
            if not isinstance(named, dict) or not all(isinstance(f, str) for f in named.values()):
                raise CheckpointError(f"{self._folder / INDEX}: it has no map `weight_map`")
            # A file of the index has to be in this folder: its name must not lead out of it.
            for file in set(named.values()):
                if Path(file).name != file or not (self._folder / file).is_file():
                    raise CheckpointError(f"{self._folder / INDEX}: {file} is not in the folder")
            return named
        if not (self._folder / SINGLE).is_file():
            raise CheckpointError(
                f"{self._folder}: neither {SINGLE} nor {INDEX} is there. Weights in .bin files are "
                "pickles, which are not read; save the model as safetensors first."
            )
        # A single file lists its own tensors.
        with _opened(self._folder / SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)

    def __contains__(self, name: str) -> bool:
        return self._name(name) in self._file_of

    def _name(self, name: str) -> str:
        """Return the folder's name of a tensor.

        A folder of the model without its head has no prefix (`wte.weight` for
        `transformer.wte.weight`), as that of OpenAI's GPT-2; transformers reads both.
        """
        bare = name.partition(".")[2]
        return bare if name not in self._file_of and bare in self._file_of else name

    def __call__(self, name: str) -> torch.Tensor:
        """Read one tensor.

        Raises:
            CheckpointError: the folder does not have it.
        """
        if name not in self:
            raise CheckpointError(f"{self._folder}: the weights lack {name}")
        name = self._name(name)
        self._read.add(name)
        with _opened(self._folder / self._file_of[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def never_read(self) -> tuple[str, ...]:
        """Return the names of tensors that were not read."""
        return tuple(sorted(set(self._file_of) - self._read))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error}. Its download or copy may not be complete"
        ) from error


def write_folder(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], config: Path) -> int:
    """Write tensors as Hugging Face does, with the model's `config.json`.

    Files have about 4 GiB, which bounds the memory that is needed twice.

    Args:
        folder: the folder to write.
        tensors: (name, tensor), in the order in which they are written.
        config: the `config.json` to copy.
    Returns:
        The number of files.
    Raises:
        CheckpointError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = held_bytes = 0

    def flush() -> None:
        try:
            save_file(held, folder / f"part-{len(parts)}.safetensors", metadata={"format": "pt"})
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{folder}: cannot be written: {error}") from error
        parts.append(sorted(held))
        held.clear()

    # Write a file whenever the next tensor would make it too large.
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held and held_bytes + size > _FILE_BYTES:
            flush()
            held_bytes = 0
        held[name] = tensor.contiguous()
        held_bytes += size
        total += size
    flush()
    # The number of files is known only now, and is in every name.
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    if len(parts) == 1:
        names = [SINGLE]
    for i, name in enumerate(names):
        (folder / f"part-{i}.safetensors").rename(folder / name)
    # Several files need an index of the tensors in them.
    if len(parts) > 1:
        weight_map = {t: names[i] for i, part in enumerate(parts) for t in part}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    shutil.copyfile(config, folder / "config.json")
    return len(parts)
