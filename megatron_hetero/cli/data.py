"""`megatron-hetero data`: text files to the data set that Megatron trains on.

`megatron_hetero.lab.data.command.write_data` does the work.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from pathlib import Path

from megatron_hetero.cli.arguments import number
from megatron_hetero.cli.output import Output
from megatron_hetero.cli.verify import require_runtime
from megatron_hetero.errors import UsageError

DESCRIPTION = """\
Turn text into the data set that Megatron trains on: PREFIX_text_document.bin and
.idx.  Lines of JSON (.jsonl) with the text under one key, or plain text; also
gzipped.  The tokenizer is given as training will have it, in Megatron's flags.
Lines that are no documents are left out, counted and named.

  megatron-hetero data corpus.jsonl -o data/corpus \\
      --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER
  megatron-hetero data book.txt -o data/book --bytes"""
TAKES_MEGATRON_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `data`."""
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="text, .jsonl or .gz")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="PREFIX",
        help="PREFIX_text_document.bin and .idx are written",
    )  # fmt: skip
    parser.add_argument(
        "--bytes",
        action="store_true",
        help="no tokenizer: every byte is a token (for demos, and for models of bytes)",
    )
    parser.add_argument(
        "--key", default="text", help="where the text stands in a line of JSON (default: text)"
    )
    parser.add_argument(
        "--documents",
        choices=("paragraph", "line", "file"),
        default="paragraph",
        help="what is a document in plain text; paragraphs end at an empty line (the default)",
    )
    parser.add_argument(
        "--workers", type=_count, default=1, metavar="N", help="processes that tokenize"
    )
    parser.add_argument("--strict", action="store_true", help="stop at a line that is no document")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Tokenize and write; say what training takes."""
    if arguments.bytes and arguments.megatron_args:
        raise UsageError("--bytes needs no tokenizer; leave Megatron's flags out")
    # Torch and Megatron are needed from here on.
    require_runtime()
    command = importlib.import_module("megatron_hetero.lab.data.command")
    request = command.DataRequest(
        tuple(arguments.files),
        arguments.output,
        None if arguments.bytes else arguments.megatron_args,
        arguments.key,
        arguments.documents,
        arguments.workers,
        arguments.strict,
    )
    # Progress by the bytes of the files that are done.
    size = sum(path.stat().st_size for path in arguments.files if path.is_file())
    with output.byte_progress("tokenizing", size) as say:
        written = command.write_data(request, say)
    # Flags with which Megatron reads what was written.
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(written.vocab_size)]
    flags = ["--data-path", str(request.data_path)]
    flags += tokenizer if arguments.bytes else arguments.megatron_args
    if arguments.json:
        output.json(
            {
                "data_path": str(request.data_path),
                "documents": written.num_documents,
                "tokens": written.num_tokens,
                "left_out": written.num_left_out,
                "faults": written.faults,
                "flags": flags,
            }
        )
        return 0
    # The first faults in words, the others as a number.
    for fault in written.faults:
        output.note(f"left out: {fault}")
    if written.num_left_out > len(written.faults):
        output.note(f"and {written.num_left_out - len(written.faults):,} more left out")
    output.show(
        f"Written to {request.data_path}.bin and .idx: {written.num_documents:,} documents, "
        f"{written.num_tokens:,} tokens"
    )
    output.show(f"Train with: {shlex.join(flags)}")
    return 0


def _count(text: str) -> int:
    value = number(int, text, "a whole number")
    if not 1 <= value <= 1024:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 1024")
    return value
