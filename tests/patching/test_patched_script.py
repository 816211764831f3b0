"""The shipped patch in a training script: patched, trained, reverted to the byte.

The script is ours, with the lines of Megatron-LM's `pretrain_gpt.py` that the patch looks for, at
the same place, so that the hunk is the one that is shipped.  Its ranks are forked; `torchrun`
starts those of `tests.runtime.test_listeners`.
"""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.patching import tree as patching
from megatron_hetero.patching.unified_diff import hunks_of
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.test_listeners import TINY

HEAD = """\
from megatron.core.enums import ModelType
from megatron.training import inprocess_restart, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron_hetero.runtime.model import gpt


def train_valid_test_datasets_provider(num_samples, vp_stage=None):
    return gpt.datasets_provider(num_samples)


if __name__ == "__main__":
"""
TAIL = """\
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        config,
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        gpt.forward_step,
        store=store,
    )
"""


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_shipped_hunk_trains_and_is_reverted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (release,) = patching.releases()
    shipped = patching.patch_text(release)
    hunks = hunks_of(shipped, release.patch)
    (hunk,) = hunks
    padding = "#\n" * (hunk.start - 1 - HEAD.count("\n"))
    text = padding + HEAD + "".join(hunk.before) + TAIL
    patches, root = tmp_path / "patches", tmp_path / "tree"
    patches.mkdir()
    root.mkdir()
    (patches / "it.patch").write_text(shipped)
    entry = release.model_dump() | {
        "release": "ours",
        "patch": "it.patch",
        "sha256": sha256(text),
    }
    (patches / "releases.json").write_text(json.dumps([entry]))
    monkeypatch.setattr(patching, "patches_folder", lambda: patches)
    script = root / release.file
    script.write_text(text)

    assert main(["patch", str(root), "--apply"]) == 0
    argv = [*TINY, f"--data-cache-path={tmp_path / 'cache'}"]

    def train(rank: int) -> None:
        sys.argv = [str(script), *argv, "--hetero-layout=tp1:2 @2 | tp1:2 @1"]
        runpy.run_path(str(script), run_name="__main__")

    run_jobs([LocalJob("patched", 2, train, tmp_path / "logs")], 110)
    printed = "".join(path.read_text() for path in sorted((tmp_path / "logs").glob("*.log")))
    assert "[whole job] iteration" in printed, "the plan was not used"
    assert len(re.findall(r"lm loss: \S+ ", printed)) == 2
    assert main(["patch", str(root), "--revert"]) == 0
    assert script.read_text() == text
