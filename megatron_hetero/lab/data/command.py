"""Writer of `PREFIX_KEY_document.bin` and `.idx`, through Megatron's own `IndexedDatasetBuilder`.

Both files appear together, whole, or not at all.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any

from megatron_hetero.errors import FileFormatError, UsageError
from megatron_hetero.files import make_folder
from megatron_hetero.lab.data.documents import Cut, TextDocument, documents
from megatron_hetero.lab.data.encode import BYTES_VOCAB_SIZE, Encode, byte_tokens, tokenizer_of
from megatron_hetero.runtime.job.local.jobs import RankFailedError
from megatron_hetero.runtime.job.local.loading import preload

_NUM_FAULTS_SHOWN = 5
_BATCH = 64
"""Documents that a worker gets at once."""

Say = Callable[[int], None]
"""Told the bytes of all files that are done."""


@dataclass(frozen=True)
class DataRequest:
    """The files to convert, and the form of the data set.

    `megatron_args` name the tokenizer; None stands for bytes.
    """

    files: tuple[Path, ...]
    prefix: Path
    megatron_args: tuple[str, ...] | None
    key: str = "text"
    cut: Cut = "paragraph"
    workers: int = 1
    strict: bool = False

    @property
    def data_path(self) -> Path:
        """Return the value for `--data-path`, named as by Megatron-LM's `preprocess_data.py`.

        Raises:
            UsageError: the prefix or the key cannot be part of a file's name.
        """
        if self.prefix.name in ("", ".."):
            raise UsageError(
                f"-o {self.prefix}: a folder; name the files: {self.prefix / 'corpus'}"
            )
        if "/" in self.key or "\0" in self.key:
            raise UsageError(f"--key {self.key!r}: it is part of the files' names, so without a /")
        return self.prefix.with_name(f"{self.prefix.name}_{self.key}_document")


@dataclass
class Written:
    """Counts of a finished data set; `faults` describe the first documents left out."""

    num_documents: int = 0
    num_tokens: int = 0
    num_left_out: int = 0
    vocab_size: int = 0
    faults: list[str] = field(default_factory=list)


def write_data(request: DataRequest, say: Say = lambda done: None) -> Written:
    """Tokenize all files into one data set; `say` gets the bytes of all finished files.

    Raises:
        UsageError: a file is missing, the data set exists already, or the tokenizer is unknown.
        FileFormatError: a document is bad and `request.strict` is set; or no document is good; or
            the data set cannot be written.
        EnvironmentMismatchError: the tokenizer's package is not installed.
        RankFailedError: a worker was ended from outside.
    """
    # Fail on a missing file before hours of tokenizing.
    for path in request.files:
        if not path.is_file():
            raise UsageError(f"{path}: there is no such file")
    preload()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    # One token a byte, or the job's own tokenizer.
    encode, vocab_size = (
        (byte_tokens, BYTES_VOCAB_SIZE)
        if request.megatron_args is None
        else tokenizer_of(request.megatron_args)
    )
    written = Written(vocab_size=vocab_size)
    # Both files under temporary names until they are whole.
    with _new_files(request.data_path) as (bin_path, idx_path):
        builder = IndexedDatasetBuilder(str(bin_path), dtype=DType.optimal_dtype(vocab_size))
        try:
            # Closed at once after an error, so that no worker outlives it.
            with closing(_tokenized(request, encode, say)) as found:
                for document, tokens in found:
                    _add(builder, document, tokens, request, written)
        finally:
            builder.data_file.close()
        if not written.num_documents:
            raise FileFormatError(
                f"none of the documents can be used; the first: {'; '.join(written.faults)}"
                if written.faults
                else "the files hold no documents"
            )
        builder.finalize(str(idx_path))
    return written


def _add(
    builder: Any, document: TextDocument, tokens: list[int], request: DataRequest, written: Written
) -> None:
    import torch

    largest = max(tokens, default=0)
    fault = document.fault
    # The range is checked here: `IndexedDatasetBuilder` writes any number that its dtype holds, and
    # only training would fail, in the lookup of the embedding.
    # An end alone is no document: Megatron-LM's own tool writes none either.
    if not fault and len(tokens) < 2:
        fault = "the tokenizer finds no token in it"
    if not fault and not 0 <= min(tokens, default=0) <= largest < written.vocab_size:
        fault = f"token {largest} is outside of the vocabulary of {written.vocab_size}"
    if not fault:
        # A good document is one item, and Megatron's index keeps the border between documents.
        builder.add_item(torch.tensor(tokens, dtype=torch.int64))
        builder.end_document()
        written.num_documents += 1
        written.num_tokens += len(tokens)
        return
    # A bad document ends the run or is counted; only the first few are kept in words.
    line = f"{document.where}: {fault}"
    if request.strict:
        raise FileFormatError(f"{line}. Mend it, or leave --strict out to go on without it.")
    written.num_left_out += 1
    if len(written.faults) < _NUM_FAULTS_SHOWN:
        written.faults.append(line)


def _tokenized(
    request: DataRequest, encode: Encode, say: Say
) -> Generator[tuple[TextDocument, list[int]]]:
    """Yield every document with its tokens, in file order, for any number of workers."""
    batches = batched(_all_documents(request, say), _BATCH)
    work = partial(_encoded, encode)
    if request.workers == 1:
        # A single worker is this process itself, without a fork.
        for batch in batches:
            yield from work(batch)
        return
    # Forked, so that the tokenizer is there already; a closure need not be sent.
    global _work
    _work = work
    pool = ProcessPoolExecutor(
        request.workers, multiprocessing.get_context("fork"), initializer=_end_with_parent
    )
    try:
        # A few batches ahead of the writer, not the whole of the files.
        ahead: deque[Future[list[tuple[TextDocument, list[int]]]]] = deque()
        # Results leave in the order in which batches go in, whatever the number of workers.
        for batch in batches:
            ahead.append(pool.submit(_in_worker, batch))
            if len(ahead) > 4 * request.workers:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()
    except BrokenProcessPool:
        raise RankFailedError(
            "a process that tokenizes was ended from outside, for example by the system for want "
            f"of memory; nothing was written. Give fewer than --workers {request.workers}"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Let a worker end with its parent, and at Ctrl-C without a word: its parent says all."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)

    def follow() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
        # A worker whose parent was killed would wait for work forever.
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


_work: Callable[[Sequence[TextDocument]], list[tuple[TextDocument, list[int]]]] | None = None


def _in_worker(batch: Sequence[TextDocument]) -> list[tuple[TextDocument, list[int]]]:
    if _work is None:
        raise RuntimeError("a worker began before it was told what to do")
    return _work(batch)


def _encoded(encode: Encode, batch: Sequence[TextDocument]) -> list[tuple[TextDocument, list[int]]]:
    found = []
    for document in batch:
        # A fault of the reader passes through: one place counts and reports all faults.
        if document.fault:
            found.append((document, list[int]()))
            continue
        try:
            found.append((document, encode(document.text)))
        except ValueError as error:
            bad = TextDocument(document.where, "", f"the tokenizer refuses it: {error}", 0)
            found.append((bad, []))
    return found


def _all_documents(request: DataRequest, say: Say) -> Iterator[TextDocument]:
    done = 0
    for path in request.files:
        try:
            for document in documents(path, request.key, request.cut):
                say(done + document.position)
                yield document
        except (OSError, EOFError, zlib.error) as error:
            raise FileFormatError(f"{path}: it cannot be read: {error}") from error
        done += path.stat().st_size
        say(done)


@contextmanager
def _new_files(data_path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield temporary names for both files; rename the files on success, the index last.

    Raises:
        UsageError: one of the files exists already.
        FileFormatError: they cannot be written.
    """
    targets = [data_path.with_name(f"{data_path.name}{end}") for end in (".bin", ".idx")]
    for target in targets:
        if target.exists():
            raise UsageError(f"{target} is there already; give another name, or remove it")
    # The names are hidden and this process's own, in the same folder, where a rename is atomic.
    make_folder(data_path.parent)
    passing = [target.with_name(f".{os.getpid()}-{target.name}") for target in targets]
    try:
        yield passing[0], passing[1]
        for path, target in zip(passing, targets, strict=True):
            os.replace(path, target)
    except OSError as error:
        # Faults of the files that are read have become `FileFormatError` before.
        raise FileFormatError(
            f"{data_path}: cannot be written: {error.strerror or error}"
        ) from None
    finally:
        for path in passing:
            path.unlink(missing_ok=True)
