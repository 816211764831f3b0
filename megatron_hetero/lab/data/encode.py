"""Conversion of texts to tokens: by Megatron's own tokenizers and flags, or byte by byte."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from megatron_hetero.errors import UsageError
from megatron_hetero.runtime.job.checks.needs import check_tokenizer

BYTES_VOCAB_SIZE = 257
"""256 bytes and the end of a document, which Megatron's NullTokenizer takes to be the last."""

Encode = Callable[[str], list[int]]


def byte_tokens(text: str) -> list[int]:
    """Return a token for every byte, and the token for the end of the document."""
    return [*text.encode("utf-8"), BYTES_VOCAB_SIZE - 1]


def tokenizer_of(megatron_args: Sequence[str]) -> tuple[Encode, int]:
    """Build the tokenizer that Megatron's flags name.

    Returns:
        A function from a text to its tokens, which end with the end of the document; and the size
        of the vocabulary.
    Raises:
        UsageError: `--tokenizer-type` is missing, or Megatron refuses it.
        EnvironmentMismatchError: the tokenizer's package is not installed.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import add_megatron_arguments

    # Megatron's own parser reads the tokenizer's flags.
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(list(megatron_args))
    if args.tokenizer_type is None:
        raise UsageError(
            "name the tokenizer that training will have: --tokenizer-type HuggingFaceTokenizer "
            "--tokenizer-model FOLDER, or another of Megatron's; or --bytes, which needs none"
        )
    check_tokenizer(args.tokenizer_type, args.tokenizer_model)
    # Nothing is padded for a model here.
    args.rank, args.pad_vocab_size = 0, False
    # Megatron's tokenizers have no common error for a missing file, package or method.
    try:
        tokenizer = build_tokenizer(args)
        end = tokenizer.eod
    except (AssertionError, ValueError, OSError, NotImplementedError, AttributeError) as error:
        raise UsageError(f"Megatron cannot build the tokenizer: {error}") from error
    if end is None:
        raise UsageError("the tokenizer has no token for the end of a document (eod, eos)")

    def encode(text: str) -> list[int]:
        return [*map(int, tokenizer.tokenize(text)), int(end)]

    return encode, int(tokenizer.vocab_size)
