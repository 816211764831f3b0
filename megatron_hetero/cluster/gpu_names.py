"""Names that drivers, schedulers, clusters and clouds give to GPUs, read whole.

A name is a model, and beside it perhaps a maker, a size of memory, a form and words that say
nothing.  It is a GPU of the catalogue only if every part of it agrees: "A10G" is no A10, "Quadro
RTX 6000" no RTX 6000 Ada, and a slice of a card is no card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from megatron_hetero.cluster.catalogue import Spelling, named_exactly, spellings

MAX_NAME = 128
"""Characters of a name; a longer one is none."""
_SLICE = re.compile(
    r"\bmig\b|(?<![a-z0-9])[0-9]{1,2}g[.]?[0-9]{1,3}gb?\b|(?<![a-z0-9])[0-9]c[.]?[0-9]g\b", re.I
)
"""MIG: "MIG 1g.10gb", "nvidia_b200_2g.45gb", "1c.3g.40gb"."""
_VGPU = re.compile(r"\bgrid\b|\bvgpu\b|[a-wyz0-9]-(?:[0-9]{1,2}|1[0-9]{2})[qcab](?:-?me)?$", re.I)
"""Profiles of vGPU: "GRID T4-16Q", "NVIDIA A40-48C"."""
_SHARED = re.compile(r"[-_ ](shared|replica)$", re.I)

_NOISE = frozenset(
    {
        *(
            "nvidia",
            "corporation",
            "corp",
            "inc",
            "amd",
            "advanced",
            "micro",
            "devices",
            "instinct",
        ),
        *("geforce", "tesla", "gpu", "gpus", "graphics", "card", "accelerator", "tensor", "core"),
        *("ampere", "hopper", "blackwell", "turing", "volta", "generation", "edition", "ac", "mba"),
        *("workstation", "ws", "series", "with", "design", "hgx", "dgx", "superchip", "mcm"),
        *("hbm2", "hbm2e", "hbm3e", "radeon"),
    }
)
"""Words that do not distinguish two GPUs of the same maker."""
_FORMS = {
    "sxm": "sxm", "sxm2": "sxm", "sxm3": "sxm", "sxm4": "sxm", "sxm5": "sxm", "sxm6": "sxm",
    "hgx": "sxm", "pcie": "pcie", "pci": "pcie", "oam": "sxm", "nvl": "nvl", "hbm3": "sxm",
}  # fmt: skip
"""Words of a form; the modules of both makers count as one, and of the cards named after their
memory only modules have HBM3."""
_FORM_OF_LINK = {"NVLink": "sxm", "Infinity Fabric": "sxm"}
_GLUED = (
    "nvidia", "geforce", "tesla", "quadro", "titan", "instinct", "rtx", "gtx", "pro", "server",
    "workstation", "blackwell", "super", "laptop", "mobile", "ada", "pcie", "nvl", "sxm", "oam",
    "hbm",
)  # fmt: skip
"""Words written without a blank to the next: "rtxproserver6000", "rtx4070tisuper"."""
_PIECES = re.compile(
    "|".join(
        (
            "max-?q",
            *(f"{w}[0-9]?(?![0-9])" if w == "sxm" else w for w in _GLUED),
            r"[0-9]{4}(?=ti|super|laptop|mobile|ada|server|pro|max|d\b|m\b)",
            r"ti(?=super|\b)",
            "[a-z]+[0-9]+[a-z]*[0-9]*",
            "[0-9]+[a-z]*",
            "[a-z]+",
        )
    )
)
_MEMORY = re.compile(r"(?<![a-z0-9.])([0-9]{1,3}) ?-?g(?:i?b)?(?![a-z0-9])")
_GEFORCE = re.compile(r"[2-5]0[5-9]0")
_AMPERE_RTX = re.compile(r"a[2456][05]00")
_NEAR_ENOUGH = 0.1
"""Fraction by which the memory stated in a list may differ from the usual memory."""


@dataclass(frozen=True)
class GpuName:
    """A name in its parts: `words` are the model's, `memory_gb` and `form` None where it has
    none."""

    words: frozenset[str]
    memory_gb: int | None
    form: str | None


def part_of_card(name: str) -> str:
    """Say which part of a card a name means ("a MIG slice", "a vGPU profile"); empty for whole
    ones."""
    if _SLICE.search(name[:MAX_NAME].replace("_", " ")):
        return "a MIG slice"
    return "a vGPU profile" if _VGPU.search(name[:MAX_NAME]) else ""


@lru_cache(maxsize=4096)
def parse_gpu_name(name: str) -> GpuName | None:
    """Read a name; None for one that is too long, or of which nothing is left."""
    if len(name) > MAX_NAME:
        return None
    # Marks of shared GPUs are of the list, not of the card; underscores stand for blanks.
    text = _SHARED.sub("", name).lower().replace("_", " ")
    text = re.sub(r"(?<=[a-z0-9])-(?=[a-z0-9])|[(),/:]", " ", re.sub("max[- ]q", "maxq", text))
    # The memory is taken out first, as "80GB" would read like a part of the model's number.
    sizes = _MEMORY.findall(text)
    text = _MEMORY.sub(" ", text)
    # Forms in the spellings of lists: "PCI-E", "NVL72" of a rack, "80GBPCIe" glued to a number.
    text = re.sub(r"\bpci e\b", "pcie", text)
    text = re.sub(r"\bnvl ?[0-9]+\b", " ", text)  # a rack
    text = re.sub(r"(?<=[0-9])(pcie|nvl|sxm[0-9]?|oam|hbm)", r" \1", text)
    form: str | None = None
    words: set[str] = set()
    for chunk in text.split():
        # A chunk that is one word stays whole; glued words are cut.
        for piece in [chunk] if chunk in _FORMS or chunk in _NOISE else _PIECES.findall(chunk):
            if piece in _FORMS:
                # The last form named counts.
                form = _FORMS[piece]
            elif piece not in _NOISE:
                words.add(piece)
    # Words that a number implies go, so that "RTX 3090" and "3090" are one.
    words = _plain(words)
    if not words:
        return None
    # The last size that the name gives counts.
    return GpuName(frozenset(words), int(sizes[-1]) if sizes else None, form)


def candidates(name: str, memory_bytes: int | None = None) -> tuple[str, ...]:
    """Return the GPUs of the catalogue that a name could be: none, the one, or several.

    Args:
        memory_bytes: of one GPU, where somebody states it.
    """
    wanted = parse_gpu_name(name)
    if wanted is None or part_of_card(name):
        return ()
    return tuple(
        known.name
        for known in spellings()
        if any(_agree(wanted, known, spelled) for spelled in _parsed(known))
        and _memory_fits(known, memory_bytes)
    )


@dataclass(frozen=True)
class FoundName:
    """A GPU of the catalogue for a name, and the `others` that the name does not rule out."""

    name: str
    others: tuple[str, ...] = ()


def find_gpu(name: str, memory_bytes: int | None = None) -> FoundName | None:
    """Find the GPU of the catalogue that a name means; None where it means none, or several alike.

    Where several agree, one that the catalogue itself calls so ("H100": the module) is meant.

    Args:
        memory_bytes: of one GPU, where somebody states it.
    """
    found = candidates(name, memory_bytes)
    if len(found) == 1:
        return FoundName(found[0])
    # Several agree: the one that is called exactly so is meant, if there is one.
    own = named_exactly(name.replace("_", " "))
    if own is None or own not in found:
        return None
    # Without a form in the name the others stay possible, and the user is told.
    wanted = parse_gpu_name(name)
    is_plain = wanted is not None and wanted.form is None
    return FoundName(own, tuple(n for n in found if n != own) if is_plain else ())


def near_candidates(name: str) -> tuple[str, ...]:
    """Return the GPUs of which a name says only a part ("rtx6000": which of several)."""
    wanted = parse_gpu_name(name)
    if wanted is None or part_of_card(name):
        return ()
    return tuple(
        known.name
        for known in spellings()
        if any(
            # The name has fewer words, one with a digit, and lacks more than numbers.
            wanted.words < spelled.words
            and any(map(_has_digit, wanted.words))
            and not all(word.isdecimal() for word in spelled.words - wanted.words)
            for spelled in _parsed(known)
        )
    )


def names_match(name: str, driver_name: str) -> bool:
    """Return whether the driver's name ("NVIDIA GeForce RTX 4090") fits a plan's name ("RTX-4090").

    A GPU of the catalogue has to be of the same model and, where both say it, the same memory,
    whether a module or a card; of a type that the user named, every word has to be one of the
    driver's.

    >>> names_match("RTX-4090", "NVIDIA GeForce RTX 4090"), names_match("RTX-4090", "RTX 4090 D")
    (True, False)
    """
    found = parse_gpu_name(driver_name)
    if found is None or part_of_card(driver_name):
        return False
    # A type of the user's own has no spellings: its words have to be among the driver's.
    known = next((k for k in spellings() if k.name == name), None)
    if known is None:
        wanted = parse_gpu_name(name)
        return wanted is not None and wanted.words <= found.words
    # Only NVL counts as a form: module and card are one model here.
    free = replace(found, form=found.form if found.form == "nvl" else None)
    return any(_agree(free, known, spelled) for spelled in _parsed(known))


def _agree(wanted: GpuName, known: Spelling, spelled: GpuName) -> bool:
    if wanted.words != spelled.words:
        return False
    # Any of the sizes in the GPU's names may be written, as well as the nominal one.
    sizes = {known.nominal_gb, *(s.memory_gb for s in _parsed(known))}
    if wanted.memory_gb is not None and wanted.memory_gb not in sizes:
        return False
    return wanted.form is None or wanted.form in _forms(known)


def _forms(known: Spelling) -> frozenset[str]:
    """Return the forms in which a GPU is sold: those of its names, or that of its link."""
    named = {spelled.form for spelled in _parsed(known)} - {None}
    return frozenset(str(f) for f in named) or frozenset({_FORM_OF_LINK.get(known.link, "pcie")})


def _memory_fits(known: Spelling, memory_bytes: int | None) -> bool:
    return memory_bytes is None or abs(known.memory_bytes / memory_bytes - 1) < _NEAR_ENOUGH


@cache
def _parsed(known: Spelling) -> tuple[GpuName, ...]:
    found = (parse_gpu_name(name) for name in (known.name, *known.aliases))
    return tuple(dict.fromkeys(name for name in found if name is not None))


def _plain(words: set[str]) -> set[str]:
    """Leave out what a model's number says already: "RTX 3090" is "3090", "Quadro RTX A6000" is
    "A6000"."""
    if any(_GEFORCE.fullmatch(word) for word in words):
        return words - {"rtx"}
    if any(_AMPERE_RTX.fullmatch(word) for word in words):
        return words - {"rtx", "quadro"}
    return words


def _has_digit(word: str) -> bool:
    return any(character.isdigit() for character in word)
