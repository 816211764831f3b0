"""The names that a driver gives to GPUs, beside those of the catalogue."""

from __future__ import annotations

from functools import cache, lru_cache

from megatron_hetero.cluster.catalogue import gpu_type_names

_VARIANTS = {"TI", "SUPER", "LAPTOP", "D", "Q", "NVL", "SERVER"}
"""Words of a driver's name that make another GPU of it ("RTX 4090 D", "... with Max-Q Design")."""


def names_match(catalogue_name: str, driver_name: str) -> bool:
    """Return whether the driver's name ("NVIDIA GeForce RTX 4090") is the catalogue's ("RTX-4090").

    Every word of the catalogue's name has to be one of the driver's, which may add a letter that
    makes no other GPU of the catalogue ("MI250X").  A memory size counts where both name one, but
    not Grace Hopper's, where the driver names the CPU's.

    >>> names_match("RTX-4090", "NVIDIA GeForce RTX 4090"), names_match("RTX-4090", "RTX 4090 D")
    (True, False)
    """
    return matching_words(catalogue_name, driver_name) > 0


def matching_words(catalogue_name: str, driver_name: str) -> int:
    """Count the words that two names share where they match (`names_match`); 0 where they do not.

    Of several that match, the one with most words is the most particular: for "NVIDIA H100 PCIe"
    "H100-PCIe", not "H100-80GB".
    """
    there, wanted = _words(driver_name), _words(catalogue_name)
    if _VARIANTS & set(there) - set(wanted):
        return 0
    sizes_there = [word for word in there if word.endswith("GB")]
    if not sizes_there or "GH200" in wanted:
        wanted = tuple(word for word in wanted if not word.endswith("GB"))
    others = _others()
    found = all(
        any(
            word == w or (word[:-1] == w and word[-1].isalpha() and word not in others)
            for word in there
        )
        for w in wanted
    )
    return len(wanted) if found else 0


@cache
def _others() -> frozenset[str]:
    return frozenset(name.upper() for name in gpu_type_names())


@lru_cache(maxsize=1024)
def _words(name: str) -> tuple[str, ...]:
    return tuple(name.upper().replace("-", " ").split())
