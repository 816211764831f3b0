"""Flags that engines declare, read from a wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools.check_engine_flags import declared, main, written


def test_flags_are_those_of_the_engines_command_alone() -> None:
    assert {"--block-size", "--kv-transfer-config"} <= written("vllm")
    assert "--worker-urls" not in written("vllm") | written("sglang")


def test_a_flag_that_a_wheel_does_not_declare_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "vllm-1.0-none.whl"
    lacking = "--block-size"
    texts = ", ".join(repr(flag) for flag in sorted(written("vllm") - {lacking, "--port"}))
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("vllm/engine/arg_utils.py", f"FLAGS = [{texts}]")
        files.writestr("vllm/entrypoints/common/cli_args.py", "class A:\n    port: int = 1\n")
        files.writestr("vllm/other.py", f"FLAGS = ['{lacking}']")
    assert declared(wheel, "vllm") >= written("vllm") - {lacking}
    assert main([str(wheel)]) == 1
    assert f"not declared: {lacking}\n" in capsys.readouterr().out
