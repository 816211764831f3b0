"""Documents of indexed data as sequences: one document is one sequence, whole.

They are read through Megatron's own builder (splits, blends, `--data-path` and its kin).  The order
depends on the seed and the epoch alone, so a job that goes on after N documents reads those that an
uninterrupted one would.  Megatron's own data set of a GPT cuts documents to `--seq-length`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.training import get_args

from megatron_hetero.errors import FileFormatError, InfeasiblePlanError, UsageError
from megatron_hetero.runtime.model.samples.datasets import dataset_config
from megatron_hetero.sequences.deal.dealt import TO_FIT

Tokens = npt.NDArray[Any]


class DocumentDataset(MegatronDataset):
    """Documents of one split, permuted anew in each epoch; sample i is a whole document.

    Raises:
        FileFormatError: the split has no document with a token.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # Document i has the pieces `ends[i]` to `ends[i + 1] - 1` of the file.
        ends = np.asarray(self.dataset.document_indices, dtype=np.int64)
        # Tokens before each piece, and so of each document of this split.
        total = np.r_[0, np.cumsum(np.asarray(self.dataset.sequence_lengths, dtype=np.int64))]
        lengths = np.diff(total[ends])[self.indices]
        self._pieces = ends
        # Documents without tokens are no samples.
        self.documents = np.asarray(self.indices)[lengths > 0]
        self.lengths = lengths[lengths > 0]
        if not len(self.documents):
            raise FileFormatError(
                f"{self.dataset_path}: its {self.index_split.name} split has no document with "
                "tokens; give another --split, or more documents"
            )
        # Around the end of an epoch two orders are in use.
        self._order = lru_cache(maxsize=2)(self._permutation)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Count the documents, which the splits divide."""
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> IndexedDataset:
        """Open the data set as Megatron's data set of a GPT does."""
        return IndexedDataset(dataset_path, multimodal=False, mmap=config.mmap_bin_files)

    def __len__(self) -> int:
        """Return the number of samples that were asked for; one epoch if none was."""
        return len(self.documents) if self.num_samples is None else self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a document: `tokens`, shape [tokens], and the `name` for messages."""
        epoch, place = divmod(int(index), len(self.documents))
        document = int(self.documents[self._order(epoch)[place]])
        first, stop = self._pieces[document], self._pieces[document + 1]
        pieces = [self.dataset.get(int(piece)) for piece in range(first, stop)]
        return {"tokens": np.concatenate(pieces), "name": self.name(document)}

    def name(self, document: int) -> str:
        """Name a document for messages."""
        return f"document {document} of {self.dataset_path}"

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        seeds = np.random.SeedSequence([self.config.random_seed, self.index_split.value, epoch])
        return np.random.default_rng(seeds).permutation(len(self.documents))


@dataclass(frozen=True)
class DocumentSplits:
    """Training, validation and test, each None where there is none; `eod` ends a document."""

    splits: tuple[Any, Any, Any]
    eod: int


def document_datasets(num_samples: Any, longest_sequence: int) -> DocumentSplits:
    """Build the documents of a job, and check them.  Collective.

    Args:
        num_samples: of each split, as Megatron gives them.
        longest_sequence: that any group of the job holds, in tokens.
    Raises:
        InfeasiblePlanError: a document is too long; the message names it.
        UsageError: a token has no row in the embedding, or there is nothing to validate on.
    """
    # Megatron builds the splits; each document stays one sample.
    args = get_args()
    config = dataset_config(args)
    built = BlendedMegatronDatasetBuilder(DocumentDataset, num_samples, lambda: True, config)
    splits = tuple(built.build())
    # Validation that is asked for needs documents.
    if splits[1] is None and args.eval_iters:
        raise UsageError(
            f"--eval-iters {args.eval_iters}: the data have no documents for validation. Give "
            "--eval-iters 0, or a --split with a second part."
        )
    # The longest sequence by memory, and by learned positions.
    limits = [
        Longest(
            longest_sequence,
            "all GPUs of the job together hold at most",
            TO_FIT,
        )
    ]
    if args.position_embedding_type == "learned_absolute":
        limits.append(
            Longest(
                args.max_position_embeddings,
                "--max-position-embeddings has",
                "Give more, or use --position-embedding-type rope.",
            )
        )
    # Every rank checks before the first step, so that none fails in the middle.
    for dataset in splits:
        if dataset is not None:
            check_documents(dataset, limits, args.padded_vocab_size)
    return DocumentSplits(splits, config.tokenizer.eod)


@dataclass(frozen=True)
class Longest:
    """Length of the longest sequence accepted by the job, in tokens, with advice on longer
    documents."""

    tokens: int
    why: str
    advice: str


def check_documents(dataset: Any, limits: list[Longest], vocab_size: int) -> None:
    """Refuse a data set with a document too long to train, before the first step.

    Args:
        dataset: of one split, blended or not.
        limits: of the job.
        vocab_size: rows of the embedding; only the first document is looked into.
    Raises:
        InfeasiblePlanError: a document is too long; the message names it.
        UsageError: a token has no row.
    """
    for documents in parts(dataset):
        place = int(documents.lengths.argmax())
        longest = int(documents.lengths[place])
        for limit in limits:
            if longest > limit.tokens:
                raise InfeasiblePlanError(
                    f"{documents.name(int(documents.documents[place]))} has {longest:,} tokens, "
                    f"and {limit.why} {limit.tokens:,}. {limit.advice}"
                )
        sample = documents[0]
        if int(sample["tokens"].max()) >= vocab_size:
            raise UsageError(
                f"{sample['name']} has token {int(sample['tokens'].max())}, and the vocabulary "
                f"has {vocab_size} rows; the data were made with another tokenizer"
            )


def parts(dataset: Any) -> Iterator[DocumentDataset]:
    """Yield the data sets of a blend, or the only data set."""
    for part in getattr(dataset, "datasets", [dataset]):
        if isinstance(part, DocumentDataset):
            yield part
        else:
            raise UsageError(
                f"--hetero-sequences trains on indexed documents, not on a {type(part).__name__}"
            )
