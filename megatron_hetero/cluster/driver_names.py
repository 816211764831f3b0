"""The names that a driver gives to GPUs, beside those of the catalogue."""

from __future__ import annotations

from megatron_hetero.cluster.catalogue import gpu_type_names


def names_match(catalogue_name: str, driver_name: str) -> bool:
    """Whether the driver's name ("NVIDIA GeForce RTX 4090") is the catalogue's ("RTX-4090").

    Every word of the catalogue's name has to be one of the driver's, which may add a letter that
    makes no other GPU of the catalogue ("MI250X").  A memory size counts where both name one, but
    not Grace Hopper's, of which the driver names the CPU's.
    """
    there, wanted = _words(driver_name), _words(catalogue_name)
    if _VARIANTS & set(there) - set(wanted):
        return False
    sizes_there = [word for word in there if word.endswith("GB")]
    if not sizes_there or "GH200" in wanted:
        wanted = [word for word in wanted if not word.endswith("GB")]
    others = {name.upper() for name in gpu_type_names()}
    return all(
        any(
            word == w or (word[:-1] == w and word[-1].isalpha() and word not in others)
            for word in there
        )
        for w in wanted
    )


_VARIANTS = {"TI", "SUPER", "LAPTOP"}


def _words(name: str) -> list[str]:
    return name.upper().replace("-", " ").split()
