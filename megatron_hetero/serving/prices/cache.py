"""Blocks of keys and values: how many a request holds, and which layers share one.

Layers that keep every token, and layers that keep a window of tokens, form groups of equally many
layers.  One pool has blocks of a group's layers, and each group takes blocks of its own.  A group
with a window gives a block back when no token to come attends to any of it.

Source: vLLM 0.33, `v1/core/kv_cache_planning.py` (`_get_kv_cache_groups_uniform_page_size`,
`_project_kv_cache_groups_to_worker`) and `v1/core/single_type_kv_cache_manager.py`
(`SingleTypeKVCacheManager.get_num_blocks_to_allocate`, `SlidingWindowManager`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class CacheGroups:
    """Groups of layers that take blocks from one pool.

    Attributes:
        block_tokens: tokens of a block.
        num_full: groups whose layers keep every token.
        num_windowed: groups whose layers keep a window.
        window: tokens that a token attends to in these, itself included.
        in_flight: most tokens of steps under way, for which an engine keeps room in a window.
    """

    block_tokens: int
    num_full: int = 1
    num_windowed: int = 0
    window: int = 0
    in_flight: int = 0

    def held(self, tokens: int, processed: int, cached: int = 0) -> int:
        """Return the blocks that a request holds by itself.

        Args:
            tokens: that have a slot.
            processed: of these, whose steps have ended.
            cached: at the front, in blocks that the request shares with others.
        """
        whole, shared = -(-tokens // self.block_tokens), cached // self.block_tokens
        gone = max(0, processed - self.window + 1) // self.block_tokens
        return self.num_full * (whole - shared) + self.num_windowed * (whole - max(shared, gone))

    def to_admit(self, tokens: int, processed: int = 0, cached: int = 0) -> int:
        """Return the blocks that have to be free for a request of so many tokens to begin: all of
        its tokens', but in a window no more than it ever holds at once."""
        whole, shared = -(-tokens // self.block_tokens), cached // self.block_tokens
        gone = max(0, processed - self.window + 1) // self.block_tokens
        near = max(0, min(whole, self.most_near) - max(shared, gone))
        return self.num_full * (whole - shared) + self.num_windowed * near

    def missing(self, tokens: int, slots: int) -> int:
        """Return the blocks that a request under way still needs for so many tokens, of which
        `slots` have a slot."""
        whole, there = -(-tokens // self.block_tokens), -(-slots // self.block_tokens)
        near = max(0, min(whole, self.most_near) - there)
        return self.num_full * (whole - there) + self.num_windowed * near

    def shared(self, tokens: int) -> int:
        """Return the blocks that hold a prefix of whole blocks for all requests that begin with it:
        in a window, those that the next token attends to."""
        whole, near = tokens // self.block_tokens, -(-max(0, self.window - 1) // self.block_tokens)
        return self.num_full * whole + self.num_windowed * min(whole, near)

    def changes_at(self, done: int) -> bool:
        """Tell if a request that decodes takes or gives back a block for the token behind `done`
        others."""
        if done % self.block_tokens == 0:
            return True
        return self.num_windowed > 0 and (done - self.window + 1) % self.block_tokens == 0

    def mean_held(self, tokens: float) -> float:
        """Return the tokens that a decoding request of so many tokens holds, summed over groups.
        A window begins and ends inside of blocks; the rest of a last block without a window is left
        out, as it is small."""
        near = min(tokens, self.window + self.block_tokens)
        return self.num_full * tokens + self.num_windowed * near

    def beyond_window(self, tokens: float, chunk: int) -> float:
        """Return the tokens that a prompt holds in a step beyond those of `mean_held`, summed over
        groups: those of its chunk."""
        near = min(tokens, self.window - 1 + chunk) - min(tokens, self.window + self.block_tokens)
        return self.num_windowed * max(0.0, near)

    @property
    def most_near(self) -> int:
        """Return the most blocks of a request in a group with a window; one more than fill it, as a
        window begins anywhere in a block."""
        return -(-(self.window - 1 + self.in_flight) // self.block_tokens) + 1


@dataclass(frozen=True)
class CachePool:
    """The blocks of a replica."""

    num_blocks: int
    groups: CacheGroups

    @classmethod
    def of_tokens(cls, tokens: int, block_tokens: int = 16) -> CachePool:
        """Return the pool of layers that all keep every token."""
        return cls(tokens // block_tokens, CacheGroups(block_tokens))

    @property
    def tokens(self) -> int:
        """Return the tokens that fit in all layers, as of requests within the window."""
        groups = self.groups.num_full + self.groups.num_windowed
        return self.num_blocks // groups * self.groups.block_tokens

    @property
    def longest(self) -> float:
        """Return the most tokens of a request that fits the empty pool; infinite where all layers
        have a window."""
        groups = self.groups
        # Up to a window all groups grow, and beyond it those without one.
        near = groups.num_windowed * groups.most_near
        if not near or self.num_blocks < near + groups.num_full * groups.most_near:
            return self.tokens
        if not groups.num_full:
            return inf
        return float((self.num_blocks - near) // groups.num_full * groups.block_tokens)


def grouped_layers(windowed: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the layers of each group, those without a window first.

    Each kind is dealt out over as few groups as hold the layers of the rarer kind, or of the more
    frequent one where that has less than 1.5 times as many.

    Args:
        windowed: 1 for each layer with a window, 0 for each other, shape [layer].
    """
    kinds = [[i for i, kind in enumerate(windowed) if kind == wanted] for wanted in (0, 1)]
    kinds = [layers for layers in kinds if layers]
    least, most = min(map(len, kinds)), max(map(len, kinds))
    size = most if most < 1.5 * least else least
    found = []
    for layers in kinds:
        number = -(-len(layers) // size)
        found += [tuple(layers[i::number]) for i in range(number)]
    return found


def cache_groups(
    windowed: Sequence[int], window: int | None, block_tokens: int, in_flight: int
) -> CacheGroups:
    """Return the groups of a model.

    Args:
        windowed: as in `grouped_layers`; empty if no layer has a window.
        window: of these layers.
        block_tokens: tokens of a block.
        in_flight: most tokens of steps under way.
    """
    if window is None or not any(windowed):
        return CacheGroups(block_tokens)
    groups = grouped_layers(windowed)
    near = sum(windowed[layers[0]] for layers in groups)
    return CacheGroups(block_tokens, len(groups) - near, near, window, in_flight)


def widest_group(windowed: Sequence[int], first: int, num_layers: int) -> int:
    """Return the layers whose keys and values share a block on a stage: the most that any group has
    there.

    Args:
        windowed: as in `grouped_layers`; empty if no layer has a window.
        first, num_layers: of the stage.
    """
    if not any(windowed):
        return num_layers
    stage = range(first, first + num_layers)
    return max(sum(i in stage for i in layers) for layers in grouped_layers(windowed))
