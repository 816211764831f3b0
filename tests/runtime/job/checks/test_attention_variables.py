"""Transformer Engine's variables beside `--attention-backend`: what Megatron would stop at."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.enums import AttnBackend

from megatron_hetero.errors import UsageError
from megatron_hetero.runtime.job.checks.attention_variables import check_attention_variables

_NAMES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@pytest.mark.parametrize("asked", list(AttnBackend))
@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("value", ["0", "1"])
def test_it_refuses_what_megatron_refuses(
    asked: AttnBackend, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in _NAMES:
        monkeypatch.setenv(other, "")  # so that what Megatron sets goes with the test
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, value)
    ours, megatrons = "", ""
    try:
        check_attention_variables(SimpleNamespace(attention_backend=asked), os.environ)
    except UsageError as error:
        ours = str(error)
    model = SimpleNamespace(
        config=SimpleNamespace(attention_backend=asked, flash_attention_version=None)
    )
    try:
        LanguageModule._set_attention_backend(model)
    except AssertionError as error:
        megatrons = str(error)
    assert bool(ours) == bool(megatrons)
    if ours:
        assert f"{name}={value}" in ours and f"--attention-backend {asked.name}" in ours
