"""The size of the vocabulary, from a job's flags about its tokenizer.

Megatron takes the size from the tokenizer and leaves `--vocab-size` to the types that have no files
(`megatron.core.tokenizers.utils.build_tokenizer`).  The files are read where they are; else a type
or a published name that has one vocabulary only stands for it, and the source says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_hetero.errors import FileFormatError, ModelError
from megatron_hetero.files import read_long_json
from megatron_hetero.model.flag_reader import FlagReader

_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_USUAL = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Sizes by type, where a type has one published vocabulary: GPT-2's, and that of Llama 2, Mistral
7B v0.1 and Mixtral."""
_PUBLISHED = {
    "gpt2": 50257,
    "meta-llama/Llama-2-": 32000,
    "mistralai/Mistral-7B-v0.1": 32000,
    "mistralai/Mixtral-8x7B-": 32000,
    "meta-llama/Meta-Llama-3": 128256,
    "meta-llama/Llama-3": 128256,
}
"""Sizes by the beginning of a Hugging Face name, added tokens included (`len(tokenizer)`)."""
_TIKTOKEN_DEFAULT = 131072
"""`DEFAULT_TIKTOKEN_MAX_VOCAB` of Megatron, whatever the file holds."""
_MAX_MODEL_BYTES = 64 << 20
"""The tokenizer.json of GPT-OSS has 28 MB, with 446,000 merges as pairs."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""


@dataclass(frozen=True)
class Vocabulary:
    """The size of a vocabulary without padding, and the source of that number."""

    size: int
    note: str


def vocabulary_of(flags: FlagReader) -> Vocabulary | None:
    """Read the vocabulary from the tokenizer's flags and files; None where they say nothing.

    Raises:
        ModelError: a file of the tokenizer is there and cannot be read.
    """
    kind = flags.known_text("--tokenizer-type")
    if kind is None and "--vocab-file" in flags and "--merge-file" in flags:
        kind = "GPT2BPETokenizer"  # as scripts older than the flag mean it
    if kind is None:
        return None
    if kind == "TikTokenizer":
        return Vocabulary(_TIKTOKEN_DEFAULT, "Megatron's default for TikTokenizer")
    # GPT-2's tokenizer is given by its vocabulary, the others by a model.
    flag = "--vocab-file" if kind == "GPT2BPETokenizer" else "--tokenizer-model"
    name = flags.known_text(flag)
    # A file that is there is counted, whatever its name says.
    if name is not None:
        try:
            read = _read(kind, Path(name))
        except (FileFormatError, OSError, ValueError) as error:
            raise ModelError(
                f"{flag} {name}: the vocabulary cannot be counted ({error}); give its size: "
                "--vocab-size N"
            ) from None
        if read is not None:
            return read
    # Without the file, a type or a name with one published vocabulary says the size.
    usual = _USUAL.get(kind)
    if kind == "HuggingFaceTokenizer" and name is not None:
        usual = next((size for start, size in _PUBLISHED.items() if name.startswith(start)), None)
        kind = name
    if usual is None:
        return None
    return Vocabulary(usual, f"assumed, the usual one of {kind}, whose file is not here")


def vocabulary_of_folder(folder: Path) -> Vocabulary | None:
    """Count the tokens of a Hugging Face model's folder; None where it has no `tokenizer.json`.

    Raises:
        ModelError: the file is there and cannot be read.
    """
    try:
        return _read("HuggingFaceTokenizer", folder)
    except (FileFormatError, OSError, ValueError) as error:
        raise ModelError(
            f"{folder / 'tokenizer.json'}: the vocabulary cannot be counted ({error}); name the "
            "config.json in place of the folder"
        ) from None


def _read(kind: str, path: Path) -> Vocabulary | None:
    """Read the vocabulary of a tokenizer's file; None where there is no such file."""
    if kind == "HuggingFaceTokenizer" and path.is_dir():
        # A Hugging Face tokenizer is a folder, or its `tokenizer.json`.
        path = path / "tokenizer.json"
    if not path.is_file():
        return None
    if kind in _SENTENCEPIECE:
        size = sum(1 for field in _fields(_bounded(path)) if field == 1)
    elif kind == "GPT2BPETokenizer":
        size = _length(read_long_json(path, _MAX_MODEL_BYTES))
    elif kind == "HuggingFaceTokenizer" and path.name == "tokenizer.json":
        size = _with_added_tokens(read_long_json(path, _MAX_MODEL_BYTES))
    else:
        return None
    if size < 1:
        raise ValueError("it holds no tokens")
    return Vocabulary(size, f"counted in {path}")


def _length(data: object) -> int:
    return len(data) if isinstance(data, dict) else 0


def _with_added_tokens(data: object) -> int:
    """Count the distinct tokens of a `tokenizer.json`."""
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        return 0
    # BPE and WordPiece have a dictionary of tokens and numbers.
    vocab = data["model"].get("vocab")
    tokens = set(vocab) if isinstance(vocab, dict) else set()
    if isinstance(vocab, list):  # Unigram: pairs of token and score
        tokens = {str(pair[0]) for pair in vocab if isinstance(pair, list) and pair}
    # Added tokens may stand in the vocabulary too, and count once.
    added = data.get("added_tokens")
    if isinstance(added, list):
        tokens |= {str(token.get("content")) for token in added if isinstance(token, dict)}
    return len(tokens)


def _bounded(path: Path) -> bytes:
    if path.stat().st_size > _MAX_MODEL_BYTES:
        raise ValueError(f"it is larger than {_MAX_MODEL_BYTES >> 20} MiB")
    return path.read_bytes()


def _fields(data: bytes) -> Iterator[int]:
    """Yield the field numbers at the top of a protocol buffer, in order; field 1 of a SentencePiece
    model is one piece of its vocabulary."""
    position = 0
    while position < len(data):
        # A tag is the field's number and, in its lowest three bits, the wire type of its value.
        tag, position = _varint(data, position)
        field, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            _, position = _varint(data, position)
        elif wire == _BYTES:
            length, position = _varint(data, position)
            position += length
        elif wire in (_FIXED64, _FIXED32):
            position += 8 if wire == _FIXED64 else 4
        else:
            raise ValueError("it is no SentencePiece model")
        # A length that leads beyond the end shows a file that is cut, or is something else.
        if position > len(data):
            raise ValueError("it is no SentencePiece model, or is cut off")
        yield field


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    # Seven bits a byte, the lowest first; the eighth bit says that more bytes follow.
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise ValueError("it is no SentencePiece model")
