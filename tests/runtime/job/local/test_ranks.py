"""The environment of ranks on this machine."""

from __future__ import annotations

import pytest

from megatron_hetero.flags.environment import CONNECTIONS_VARIABLE
from megatron_hetero.runtime.job.local.ranks import rank_environment


def test_ranks_share_the_cards_of_a_machine_that_has_too_few() -> None:
    """NCCL takes two ranks on one card only from what it believes to be two hosts."""
    ranks = [rank_environment(rank, 3, "store", num_cards=2) for rank in range(3)]
    assert [own["LOCAL_RANK"] for own in ranks] == ["0", "1", "0"]
    assert len({own["NCCL_HOSTID"] for own in ranks}) == 3
    assert all(own["NCCL_SOCKET_IFNAME"] == "lo" for own in ranks)
    for num_cards in (0, 3, 8):
        alone = rank_environment(2, 3, "store", num_cards)
        assert alone["LOCAL_RANK"] == "2" and "NCCL_HOSTID" not in alone


def test_ranks_have_one_connection_unless_the_user_says_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron refuses tensor and context parallelism with any other number before Blackwell."""
    monkeypatch.delenv(CONNECTIONS_VARIABLE, raising=False)
    assert CONNECTIONS_VARIABLE not in rank_environment(0, 1, "store", num_cards=1)
    for num_cards in (0, 1, 2):
        assert rank_environment(0, 2, "store", num_cards)[CONNECTIONS_VARIABLE] == "1"
    monkeypatch.setenv(CONNECTIONS_VARIABLE, "8")
    assert rank_environment(0, 2, "store", num_cards=1)[CONNECTIONS_VARIABLE] == "8"
