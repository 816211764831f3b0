"""What a job of flexible sequences cannot follow is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.runtime.job.checks.flexible_sequences import ADDED, REFUSED, check_words
from megatron_hetero.runtime.job.checks.support import refuse

ACCEPTED: dict[str, Any] = {
    "transformer_impl": "local", "attention_backend": AttnBackend.auto, "spec": None,
    "multi_latent_attention": False,
    "num_experts": None, "mtp_num_layers": None, "window_size": None,
    "position_embedding_type": "rope", "sft": False, "dataloader_inter_document_masking": False,
    "reset_attention_mask": False, "reset_position_ids": False, "mock_data": False,
    "fim_data": False, "dataloader_fast_cache_load": False, "full_validation": False,
    "multiple_validation_sets": False, "step_batch_size_schedule": None,
    "phase_transition_iterations": None, "fp8": None, "recompute_granularity": None,
    "recompute_modules": None,
}  # fmt: skip
"""Parsed arguments that a job can follow."""
OTHERS: dict[str, Any] = {
    "transformer_impl": "transformer_engine", "attention_backend": AttnBackend.unfused,
    "spec": ["m", "f"], "multi_latent_attention": True,
    "num_experts": 8, "mtp_num_layers": 1, "window_size": (7, 0),
    "position_embedding_type": "yarn", "sft": True, "reset_position_ids": True, "mock_data": True,
    "fim_data": True, "dataloader_fast_cache_load": True, "full_validation": True,
    "step_batch_size_schedule": "0:8", "phase_transition_iterations": [4], "fp8": "hybrid",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_covered_is_refused_by_name(name: str) -> None:
    refuse(REFUSED, SimpleNamespace(**ACCEPTED), "-")
    asked = SimpleNamespace(**{**ACCEPTED, name: OTHERS[name]})
    with pytest.raises(UnsupportedError, match="--" + name.replace("_", "-").split("-val")[0]):
        refuse(REFUSED, asked, "-")


def test_every_refusal_has_a_case() -> None:
    # The last rule, of what is recomputed, has two arguments.
    assert len(OTHERS) == len(REFUSED) - 1
    asked = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    refuse(REFUSED, SimpleNamespace(**{**ACCEPTED, **asked}), "-")
    asked["recompute_modules"] = ["core_attn", "mlp"]
    with pytest.raises(UnsupportedError, match="recompute core_attn alone"):
        refuse(REFUSED, SimpleNamespace(**{**ACCEPTED, **asked}), "-")


def test_what_the_job_adds_itself_may_be_given() -> None:
    check_words(ADDED, shuffles=False)
    check_words(["--micro-batch-size", "1", "--global-batch-size=2"], shuffles=False)
    with pytest.raises(UsageError, match=r"--micro-batch-size 4: .* leave it out"):
        check_words(["--micro-batch-size", "4"], shuffles=False)
    with pytest.raises(UsageError, match="shuffled anew in every epoch already"):
        check_words([], shuffles=True)
