"""Treatment of each Megatron flag in `verify`: none is overlooked, none dropped without a word."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import get_args

import pytest

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.support.kinds import Treatment
from megatron_hetero.flags.support.lookup import support_of
from megatron_hetero.flags.support.tables import verification_table
from megatron_hetero.flags.support.verification import FP8, OF_STATUS, treat, treatments_of
from megatron_hetero.model.flag_table import flag_table

TABLE = verification_table()
NAMES = {name for flag in flag_table().flags for name in flag.names}
LOST = (
    "--clip-grad --weight-decay --adam-beta2 --squared-relu --window-attn-skip-freq "
    "--rotary-percent --init-method-std --softmax-type --recompute-method --reset-position-ids"
)
"""Flags that an earlier version dropped without a word."""


def test_every_flag_has_a_treatment() -> None:
    for flag in flag_table().flags:
        entries = treatments_of(flag)
        assert {entry.treatment for entry in entries} <= set(get_args(Treatment)), flag.names
        assert not entries[-1].values, f"{flag.names}: no entry for other values"
        assert all(entry.values for entry in entries[:-1])


def test_what_a_plan_follows_is_decided_here() -> None:
    """A new flag that the runtime follows needs an entry of its own."""
    followed = {"proved", "passed on", "no effect"}
    assert not followed & set(OF_STATUS)
    of_status = set(OF_STATUS.values())
    for flag in flag_table().flags:
        if treatments_of(flag)[-1] in of_status:
            assert support_of(flag).status not in followed


def test_what_is_left_out_is_what_a_cpu_cannot_run() -> None:
    reasons = {entry.note for entry in TABLE if entry.treatment == "left out"}
    assert reasons == {
        "kernels of Transformer Engine or of another library for GPUs",
        "fp8 products need Transformer Engine and a GPU",
        "communication overlap and transports of GPUs",
        "CUDA graphs",
        "memory of GPUs that is moved to the host",
    }


def test_fp8_that_the_small_model_may_lack_is_in_the_table() -> None:
    assert [entry.treatment for entry in TABLE if entry.note == FP8] == ["kept in half precision"]


def test_no_effect_names_its_class() -> None:
    assert all(entry.note for entry in TABLE if entry.treatment in ("no effect", "shrunk"))


@pytest.mark.parametrize("name", LOST.split())
def test_flags_that_were_lost_are_kept(name: str) -> None:
    assert [entry.treatment for entry in treatments_of(flag_table().by_name[name])] == ["kept"]


def test_every_name_is_a_flag_and_named_once() -> None:
    named = [(name, entry.values) for entry in TABLE for name in entry.names]
    assert [n for n, _ in named if not any(fnmatchcase(flag, n) for flag in NAMES)] == []
    assert [n for n in named if "*" not in n[0] and named.count(n) > 1] == []


def test_values_decide_where_they_do() -> None:
    def of(*words: str) -> str:
        return treat(flag_table().split(words)).options[0][1].treatment

    assert of("--transformer-impl", "local") == "kept"
    assert of("--transformer-impl", "transformer_engine") == "kept"
    assert of("--attention-backend", "flash") == "left out"
    assert of("--cross-entropy-fusion-impl", "native") == "kept"
    assert of("--cross-entropy-loss-fusion") == "kept in half precision"


def test_what_cannot_be_compared_is_refused_by_name() -> None:
    given = flag_table().split(["--skip-train", "--lr", "1", "--iterations-to-skip", "2"])
    with pytest.raises(UnsupportedError, match=r"--skip-train(.|\n)*--iterations-to-skip 2"):
        treat(given)
    assert treat(flag_table().split(["--error-injection-type", "transient_error"])).of("refused")
