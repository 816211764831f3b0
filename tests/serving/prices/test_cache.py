"""Blocks of keys and values, counted as vLLM counts them: table by table, block by block."""

from __future__ import annotations

import json
import random
from math import inf
from pathlib import Path

import pytest

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.model.attention_window import windowed_layers
from megatron_hetero.serving.prices.cache import (
    CacheGroups,
    CachePool,
    cache_groups,
    grouped_layers,
    widest_group,
)
from megatron_hetero.serving.prices.engine import ENGINES
from megatron_hetero.serving.prices.served import load_served

GEMMA = ([1] * 5 + [0]) * 4 + [1, 1]
"""Gemma 3 1B: 22 layers with a window, 4 without."""


def test_layers_form_groups_of_the_rarer_kind() -> None:
    groups = grouped_layers(GEMMA)
    assert [len(layers) for layers in groups] == [4, 4, 4, 4, 4, 3, 3]
    assert groups[0] == (5, 11, 17, 23)
    assert sorted(layer for layers in groups for layer in layers) == list(range(26))
    # 12 and 13 layers are padded to 13 and 13; 20 and 30 are 20, 15 and 15.
    assert [len(g) for g in grouped_layers([1, 0] * 12 + [0])] == [13, 12]
    assert [len(g) for g in grouped_layers([0] * 20 + [1] * 30)] == [20, 15, 15]
    assert grouped_layers([1] * 8) == [tuple(range(8))]


def test_groups_are_dealt_out_so_that_each_stage_has_a_part_of_each() -> None:
    """vLLM deals the layers of the whole model, and a stage keeps its own of each group."""
    three_to_one = [0, 1, 1] * 4
    assert widest_group(three_to_one, 0, 12) == 4
    assert [widest_group(three_to_one, first, 6) for first in (0, 6)] == [2, 2]
    assert widest_group(three_to_one, 1, 2) == 1
    assert widest_group((), 3, 7) == 7


class _Table:
    """The block table of a request in one group, as vLLM keeps it: None was given back."""

    def __init__(self, window: int | None, block: int) -> None:
        self.window, self.block = window, block
        self.blocks: list[int | None] = []

    def step(self, slots: int, processed: int, cached: int) -> int:
        """Allot slots for a step; return the blocks that are held, without shared ones."""
        if self.window is not None:
            for i in range(min(max(0, processed - self.window + 1) // self.block,
                               len(self.blocks))):  # fmt: skip
                self.blocks[i] = None
        self.blocks += range(len(self.blocks), -(-slots // self.block))
        own = range(cached // self.block, len(self.blocks))
        return sum(self.blocks[i] is not None for i in own)


@pytest.mark.parametrize("seed", range(20))
def test_a_request_holds_the_blocks_of_its_tables(seed: int) -> None:
    rng = random.Random(seed)
    block, window = rng.choice([1, 4, 16, 64]), rng.randint(1, 300)
    num_full, num_windowed = rng.randint(0, 2), rng.randint(1, 5)
    budget = rng.randint(1, 400)
    groups = CacheGroups(block, num_full, num_windowed, window, 2 * budget)
    tables = [_Table(None, block) for _ in range(num_full)]
    tables += [_Table(window, block) for _ in range(num_windowed)]
    prompt = rng.randint(1, 2000)
    done, most = 0, 0
    while done < prompt + 300:
        chunk = min(budget, prompt - done) if done < prompt else 1
        held = groups.held(done + chunk, done)
        assert held == sum(t.step(done + chunk, done, 0) for t in tables)
        if done > prompt and not groups.changes_at(done):
            assert held == groups.held(done, done - 1)
        most = max(most, held)
        done += chunk
    # What has to be free for all of it to begin is enough, and not much more.
    assert most <= groups.to_admit(done)
    assert groups.to_admit(done) <= groups.num_full * -(-done // block) + num_windowed * (
        -(-(window - 1 + 2 * budget) // block) + 1
    )
    assert groups.missing(done, 0) == groups.to_admit(done)
    assert groups.missing(done, done) == 0


def test_a_shared_prefix_is_held_once_and_in_a_window_only_as_far_as_it_reaches() -> None:
    groups = CacheGroups(16, 1, 3, 100, 512)
    assert groups.shared(1600) == 100 + 3 * 7
    assert groups.shared(48) == 4 * 3
    # A request behind the prefix has its own blocks, and sees no further back than the window.
    assert groups.held(1700, 1600, 1600) == 4 * 7
    assert groups.held(1800, 1799, 1600) == 13 + 3 * (113 - 106)


def test_the_longest_request_of_a_pool() -> None:
    plain = CachePool.of_tokens(1000)
    assert plain.tokens == plain.longest == 992
    groups = CacheGroups(16, 1, 5, 1024, 2 * 8192)
    near = -(-(1023 + 16384) // 16) + 1
    # Up to the window and the steps under way every group grows.
    assert CachePool(6 * 500, groups).longest == 8000
    assert CachePool(6 * near + 100, groups).longest == (near + 100) * 16
    longest = int(CachePool(20_000, groups).longest)
    assert groups.to_admit(longest) <= 20_000 < groups.to_admit(longest + 1)
    # Where all layers have a window, no request is too long.
    assert CachePool(near, CacheGroups(16, 0, 1, 1024, 2 * 8192)).longest == inf
    assert CachePool(near - 1, CacheGroups(16, 0, 1, 1024, 2 * 8192)).longest == (near - 1) * 16


def test_models_without_windows_have_one_group() -> None:
    assert cache_groups((), None, 16, 8192) == CacheGroups(16)
    assert cache_groups((0, 0), 1024, 16, 8192) == CacheGroups(16)
    assert cache_groups(GEMMA, 512, 16, 8192) == CacheGroups(16, 1, 6, 512, 8192)


def test_flags_say_which_layers_have_a_window() -> None:
    window = ("--window-size", "1023,0")
    assert windowed_layers((), 6) == ()
    assert windowed_layers(("--window-size", "-1,0"), 6) == ()
    assert windowed_layers(window, 6) == (1,) * 6
    assert windowed_layers((*window, "--window-attn-skip-freq", "3"), 7) == (1, 1, 0, 1, 1, 0, 1)
    listed = (*window, "--window-attn-skip-freq", "([1]*2+[0]*1)*2")
    assert windowed_layers(listed, 6) == (1, 1, 0, 1, 1, 0)
    for freq in ("0", "[1,0]", "[2]*6", "every"):
        with pytest.raises(UsageError, match=r"--window-attn-skip-freq is .* list of the 6 layers"):
            windowed_layers((*window, "--window-attn-skip-freq", freq), 6)


def test_softmax_offsets_go_with_windows_in_vllm_and_not_with_two_pools(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "head_dim": 64,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "num_local_experts": 32, "max_position_embeddings": 131072,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    served = load_served(tmp_path, None, "16-bit")
    assert (served.window, served.windowed) == (128, (1, 0) * 12)
    assert served.under(ENGINES["vllm"]) is served
    with pytest.raises(UnsupportedError, match=r"two pools .* in sglang, .* take --engine vllm"):
        served.under(ENGINES["sglang"])
