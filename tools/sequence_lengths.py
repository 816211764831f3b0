"""Lengths of the documents of an indexed data set, as `plan --sequences` reads them.

    python tools/sequence_lengths.py data/wiki_text_document -o lengths.txt

PREFIX is what `--data-path` names, without `.bin` or `.idx`; only the index is read.  A document is
one sequence, however many pieces the data set keeps it in.  Statistics go to standard error.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_hetero.errors import FileFormatError, HeteroError
from megatron_hetero.sequences.lengths import Lengths
from tools.drawn_lengths import lengths_of, written_lengths


def document_lengths(prefix: str) -> Lengths:
    """Count the tokens of every document of a data set.

    Raises:
        FileFormatError: there is no such data set, its index is damaged, or it has no tokens.
    """
    import_module("megatron_hetero.runtime")  # hides a Transformer Engine without its library
    from megatron.core.datasets.indexed_dataset import _IndexReader

    path = Path(f"{prefix}.idx")
    if not path.is_file():
        raise FileFormatError(f"{path}: there is no such file; PREFIX is that of --data-path")
    try:
        index = _IndexReader(str(path), multimodal=False)
        pieces = np.asarray(index.sequence_lengths, dtype=np.int64)
        ends = np.asarray(index.document_indices, dtype=np.int64)
    except (AssertionError, ValueError, OSError) as error:
        raise FileFormatError(f"{path}: this is no index of Megatron's: {error}") from error
    total = np.r_[0, np.cumsum(pieces)]
    if ends[0] != 0 or ends[-1] != len(pieces) or (np.diff(ends) < 0).any():
        raise FileFormatError(f"{path}: its documents do not add up to its {len(pieces)} pieces")
    tokens = np.diff(total[ends])
    tokens = tokens[tokens > 0]
    if not len(tokens):
        raise FileFormatError(f"{path}: it has no tokens")
    return lengths_of([int(t) for t in tokens], prefix)


def statistics(lengths: Lengths) -> str:
    """Write what a reader wants to know of lengths."""
    parts = ", ".join(f"{part:.0%} {lengths.quantile(part):,}" for part in (0.5, 0.9, 0.99, 1.0))
    return (
        f"{lengths.num_sequences:,} documents, {lengths.num_tokens:,} tokens; at most: {parts}; "
        f"{lengths.part_below(8192):.1%} below 8,192"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("prefix", help="of the data set")
    parser.add_argument("-o", "--output", type=Path, help="by default standard output")
    options = parser.parse_args(arguments)
    try:
        lengths = document_lengths(options.prefix)
    except HeteroError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(statistics(lengths), file=sys.stderr)
    if options.output is None:
        sys.stdout.write(written_lengths(lengths))
    else:
        options.output.write_text(written_lengths(lengths), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
