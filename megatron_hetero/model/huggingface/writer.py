"""Megatron flags, each with the line of the key in `config.json`, and refusals of keys without a
flag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NoReturn

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.files import Document
from megatron_hetero.model.huggingface.config import DecoderConfig, LatentConfig, NeoxConfig
from megatron_hetero.model.shell.values import Word

Key = str | tuple[str, ...]


class FlagWriter:
    """The Megatron flags of one `config.json`.

    `differences` holds, in words, whatever Megatron's model has otherwise than the file.
    """

    def __init__(self, document: Document) -> None:
        self.words: list[Word] = []
        self.differences: list[str] = []
        self._document = document

    def add(self, key: Key, *words: object) -> None:
        """Write words that follow from the value of `key`."""
        where = self.locate(key)
        self.words += [Word(str(word), where) for word in words]

    def switch(self, key: Key, flag: str, is_on: bool) -> None:
        """Write a flag without value where `is_on`."""
        if is_on:
            self.add(key, flag)

    def sizes(self, values: Mapping[str, tuple[str, object]]) -> None:
        """Write flags with one value each: by key, the flag and its value."""
        for key, (flag, value) in values.items():
            self.add(key, flag, value)

    def differ(self, difference: str) -> None:
        """Note a part that Megatron has otherwise than the file."""
        self.differences.append(difference)

    def locate(self, key: Key) -> str:
        """Return file and line of a key."""
        return self._document.locate([key] if isinstance(key, str) else key)

    def require(self, key: Key, value: object, *allowed: object) -> None:
        """Check a value for which Megatron supports `allowed` only.

        Raises:
            UnsupportedError: the value is none of them.
        """
        if value not in allowed:
            verb = "is" if len(allowed) == 1 else "are"
            self.refuse(
                key,
                f"is {repr(value)[:80]}; Megatron has no flag for it, and only "
                f"{' and '.join(map(repr, allowed))} {verb} supported",
            )

    def refuse(self, key: Key, fault: str) -> NoReturn:
        """Raise `UnsupportedError` with the line, the key and its fault."""
        name = key if isinstance(key, str) else ".".join(key)
        raise UnsupportedError(f"{self.locate(key)}: {name} {fault}")


def shape_of(writer: FlagWriter, config: DecoderConfig | LatentConfig | NeoxConfig) -> None:
    """Write the sizes that most families name alike."""
    writer.sizes(
        {
            "num_hidden_layers": ("--num-layers", config.num_hidden_layers),
            "hidden_size": ("--hidden-size", config.hidden_size),
            "intermediate_size": ("--ffn-hidden-size", config.intermediate_size),
            "num_attention_heads": ("--num-attention-heads", config.num_attention_heads),
            "max_position_embeddings": (
                "--max-position-embeddings",
                config.max_position_embeddings,
            ),
        }
    )


def dropouts(writer: FlagWriter, attention: tuple[str, float], hidden: tuple[str, float]) -> None:
    """Write both dropouts always, each given as key and value: without the flags Megatron drops
    0.1."""
    writer.add(attention[0], "--attention-dropout", repr(attention[1]))
    writer.add(hidden[0], "--hidden-dropout", repr(hidden[1]))


def layer_pattern(kinds: Sequence[int]) -> str:
    """Write zeros and ones by layer in Megatron's notation: "[0]*3+[1]*58"."""
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    return "+".join(f"[{kind}]*{count}" for kind, count in runs)
