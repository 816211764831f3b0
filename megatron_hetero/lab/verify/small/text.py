"""Real text that every Python machine has: the source of the standard library, as bytes.

It is written by Megatron's own `IndexedDatasetBuilder`, so a run reads it as a user's `.bin/.idx`.
A document is a run of lines between blank lines: their unlike lengths put unlike numbers of
end-of-document tokens into samples, which `--eod-mask-loss` takes out of the loss.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

VOCAB_SIZE = 257
"""256 bytes and the end-of-document token, which Megatron's NullTokenizer takes to be the last."""


def paragraphs() -> Iterator[bytes]:
    """Yield the standard library's source, paragraph by paragraph, files in alphabetical order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")):
        yield from (p for p in path.read_bytes().split(b"\n\n") if p.strip())


def write_text_dataset(prefix: Path, num_tokens: int) -> int:
    """Write `prefix.bin` and `prefix.idx` with at least `num_tokens` tokens, if there are.

    Returns:
        The number of tokens written.
    """
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(VOCAB_SIZE))
    written = 0
    for paragraph in paragraphs():
        # One token a byte, then the end of the document.
        tokens = numpy.fromiter(chain(paragraph, [VOCAB_SIZE - 1]), dtype=numpy.int64)
        builder.add_item(torch.from_numpy(tokens))
        builder.end_document()
        written += len(tokens)
        if written >= num_tokens:
            break
    builder.finalize(f"{prefix}.idx")
    return written


def tokenizer_arguments(prefix: Path) -> tuple[str, ...]:
    """Return the flags by which Megatron reads the data set, entirely for training."""
    return (
        "--tokenizer-type=NullTokenizer",
        f"--vocab-size={VOCAB_SIZE}",
        f"--data-path={prefix}",
        "--split=1,0,0",
        "--eod-mask-loss",
    )
