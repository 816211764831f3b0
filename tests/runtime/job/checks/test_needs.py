"""Packages and partners of flags: asked for by name, before anything starts."""

from __future__ import annotations

import pytest

from megatron_hetero.errors import EnvironmentMismatchError, HeteroError, UsageError
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.runtime.job.checks import needs
from tests.runtime.flag_runs import LAYOUT
from tests.runtime.test_refusals import MODEL, refuse


@pytest.mark.parametrize(
    ("flags", "missing", "error", "says"),
    [
        (["--tensorboard-dir=x"], "tensorboard", EnvironmentMismatchError, "pip install tensorb"),
        (["--wandb-project=x"], "wandb", EnvironmentMismatchError, "pip install wandb"),
        (["--wandb-project=x"], None, UsageError, "--wandb-exp-name"),
        (["--wandb-project=x", "--wandb-exp-name=y"], None, UsageError, "--wandb-save-dir"),
        (
            ["--tokenizer-type=HuggingFaceTokenizer", "--tokenizer-model=x"],
            "transformers", EnvironmentMismatchError, "pip install transformers",
        ),
        (["--tokenizer-type=HuggingFaceTokenizer"], None, UsageError, "--tokenizer-model PATH"),
        (["--tokenizer-type=TikTokenizer"], "tiktoken", EnvironmentMismatchError, "pip install t"),
        (["--tokenizer-type=Llama2Tokenizer"], "sentencepiece", EnvironmentMismatchError, "pip"),
        ([], "transformers", EnvironmentMismatchError, "--tokenizer-type GPT2BPETokenizer"),
        (
            ["--enable-ft-package"], "nvidia-resiliency-ext", EnvironmentMismatchError,
            "pip install nvidia-resiliency-ext",
        ),
        (["--enable-ft-package"], None, UsageError, "--save FOLDER"),
        (["--adlr-autoresume"], None, UsageError, "NVIDIA's own cluster"),
        (["--profile"], None, UsageError, "--use-pytorch-profiler"),
        (["--profile", "--use-pytorch-profiler"], None, UsageError, "--tensorboard-dir FOLDER"),
    ],
)  # fmt: skip
def test_what_a_flag_needs_is_asked_before_anything_starts(
    flags: list[str],
    missing: str | None,
    error: type[HeteroError],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(needs, "_is_installed", lambda package: package != missing)
    given = flag_table().split(flags)
    with pytest.raises(error, match=says):
        needs.check_needs(given, cuda=False, default_tokenizer="GPT2BPETokenizer")


def test_the_profiler_takes_the_folder_without_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(needs, "_is_installed", lambda package: False)
    given = flag_table().split(
        ["--tokenizer-type=NullTokenizer", "--profile", "--use-pytorch-profiler",
         "--tensorboard-dir=x"]
    )  # fmt: skip
    (warning,) = needs.check_needs(given, cuda=False)
    assert "no TensorBoard logs are written" in warning


@pytest.fixture
def world_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.mark.parametrize("plan_flags", [[], [f"--hetero-layout={LAYOUT}"]], ids=["stock", "plan"])
def test_every_door_asks(plan_flags: list[str], world_of_four: None) -> None:
    argv = [*MODEL, *plan_flags, "--profile"]
    assert "--use-pytorch-profiler" in refuse(argv, UsageError)


@pytest.mark.parametrize("plan_flags", [[], [f"--hetero-layout={LAYOUT}"]], ids=["stock", "plan"])
def test_what_megatron_refuses_is_no_traceback(plan_flags: list[str], world_of_four: None) -> None:
    argv = [*MODEL, *plan_flags, "--num-query-groups=3", "--group-query-attention", "--fp16"]
    assert "Megatron refuses the flags" in refuse([*argv, "--bf16"], UsageError)


def test_a_job_that_has_what_it_needs_is_not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of several equal flags counts, as in Megatron; a word may follow a flag or an =."""
    monkeypatch.setattr(needs, "_is_installed", lambda package: package != "transformers")
    flags = ["--tokenizer-type=HuggingFaceTokenizer", "--tokenizer-type", "NullTokenizer",
             "--tensorboard-dir=x", "--wandb-project=p", "--wandb-exp-name=n", "--save=s",
             "--enable-ft-package"]  # fmt: skip
    assert needs.check_needs(flag_table().split(flags), cuda=False) == ()
    assert needs.check_needs(flag_table().split(["--profile"]), cuda=True) == ()
    with pytest.raises(EnvironmentMismatchError, match="transformers"):
        needs.check_needs(flag_table().split(flags[:1]), cuda=False)


def test_tokenizers_are_those_that_megatron_has() -> None:
    """Nobody asks for a package for the sake of a tokenizer that no flag can name."""
    option = flag_table().by_name["--tokenizer-type"]
    assert option.choices and set(needs.PACKAGE_OF_TOKENIZER) <= set(option.choices)
