"""Packages and partners needed by flags beside Megatron, checked before Megatron's parser.

Megatron itself continues without a word (no TensorBoard logs), exits with status 0 (the resumption
of NVIDIA's own cluster), or ends in a traceback while it parses (tokenizers, W&B).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec

from megatron_hetero.errors import EnvironmentMismatchError, UsageError
from megatron_hetero.flags.needed import READ_A_MODEL
from megatron_hetero.model.flag_table import Option, last_of_each

PACKAGE_OF_TOKENIZER: Mapping[str, str] = {
    "HuggingFaceTokenizer": "transformers",
    "GPT2BPETokenizer": "transformers",
    "BertWordPieceLowerCase": "transformers",
    "BertWordPieceCase": "transformers",
    "SFTTokenizer": "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}
"""Packages that `megatron.core.tokenizers.text.libraries` imports."""


def check_needs(
    given: Sequence[Option], *, cuda: bool, default_tokenizer: str | None = None
) -> tuple[str, ...]:
    """Refuse flags whose package or partner is missing.

    Args:
        given: Megatron's options of the job.
        cuda: the job runs on GPUs.
        default_tokenizer: the pre-training script's tokenizer without `--tokenizer-type`.
    Returns:
        Warnings.
    Raises:
        EnvironmentMismatchError: a package is missing; the message names it.
        UsageError: a flag without which another cannot work is missing.
    """
    # The last word of each flag counts, as in Megatron's parser.
    options = {option.flag.names[0]: option for option in last_of_each(given)}
    kind = _word(options, "--tokenizer-type") or default_tokenizer
    if kind is not None:
        check_tokenizer(kind, _word(options, "--tokenizer-model"))
    _check_wandb(options)
    if "--adlr-autoresume" in options:
        raise UsageError(
            "--adlr-autoresume asks a module of NVIDIA's own cluster, without which Megatron ends "
            "the job as if it were done. Leave it out; --exit-duration-in-mins and "
            "--exit-signal-handler end a job with a checkpoint."
        )
    _check_monitor(options)
    _check_profiler(options, cuda=cuda)
    return tuple(_tensorboard_warnings(options))


def check_tokenizer(kind: str, model: str | None) -> None:
    """Refuse a tokenizer (`--tokenizer-type`, `--tokenizer-model`) that cannot be built here.

    Raises:
        EnvironmentMismatchError, UsageError: as `check_needs`.
    """
    # A tokenizer without an entry needs no package.
    package = PACKAGE_OF_TOKENIZER.get(kind)
    if package is not None and not _is_installed(package):
        raise EnvironmentMismatchError(
            f"--tokenizer-type {kind} needs the package {package}, which is not installed. Install "
            f"it with pip install {package}, or give another --tokenizer-type (NullTokenizer needs "
            "none)."
        )
    if kind in READ_A_MODEL and not model:
        raise UsageError(
            f"--tokenizer-type {kind} without --tokenizer-model: it is read from that file or "
            "folder. Add --tokenizer-model PATH."
        )


def _check_wandb(options: Mapping[str, Option]) -> None:
    # An empty project switches W&B off, as in Megatron.
    if not _word(options, "--wandb-project"):
        return
    _need_package("--wandb-project", "wandb")
    if not _word(options, "--wandb-exp-name"):
        raise UsageError("--wandb-project without --wandb-exp-name: add the run's name.")
    if not _word(options, "--wandb-save-dir") and not _word(options, "--save"):
        raise UsageError(
            "--wandb-project without a folder: add --wandb-save-dir, or --save, beside which "
            "Megatron puts it."
        )


def _check_monitor(options: Mapping[str, Option]) -> None:
    if "--enable-ft-package" not in options:
        return
    _need_package("--enable-ft-package", "nvidia-resiliency-ext")
    if not _word(options, "--save"):
        raise UsageError(
            "--enable-ft-package without --save: it keeps the times that it waits there. Add "
            "--save FOLDER."
        )


def _check_profiler(options: Mapping[str, Option], *, cuda: bool) -> None:
    if "--profile" not in options:
        return
    if "--use-pytorch-profiler" not in options:
        if not cuda:
            raise UsageError(
                "--profile without --use-pytorch-profiler drives NVIDIA's profiler, and there is "
                "no GPU here. Add --use-pytorch-profiler and --tensorboard-dir."
            )
        return
    if not _word(options, "--tensorboard-dir"):
        raise UsageError(
            "--use-pytorch-profiler without --tensorboard-dir: Megatron puts the traces into "
            "torch_profile/ beside that folder. Add --tensorboard-dir FOLDER."
        )


def _tensorboard_warnings(options: Mapping[str, Option]) -> Iterator[str]:
    if not _word(options, "--tensorboard-dir") or _is_installed("tensorboard"):
        return
    # The profiler uses the folder without the package; every log needs the package.
    if "--use-pytorch-profiler" not in options:
        _need_package("--tensorboard-dir", "tensorboard")
    yield (
        "the package tensorboard is not installed: --tensorboard-dir says where the profiler's "
        "traces go, and no TensorBoard logs are written"
    )


def _need_package(flag: str, package: str) -> None:
    if not _is_installed(package):
        raise EnvironmentMismatchError(
            f"{flag} needs the package {package}, which is not installed. Install it with "
            f"pip install {package}, or leave {flag} out."
        )


def _is_installed(package: str) -> bool:
    # A package's name has dashes where its module has underscores.
    return find_spec(package.replace("-", "_")) is not None


def _word(options: Mapping[str, Option], name: str) -> str | None:
    option = options.get(name)
    return option.values[0] if option is not None and option.values else None
