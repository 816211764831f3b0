"""Makers of GPUs, and the library for exchanges of tensors between machines of each maker.

The GPUs of one job speak one library: a process group of torch has one backend, NVIDIA's NCCL and
AMD's RCCL (the same interface, other code and another wire format) do not meet in one group, and
each needs a build of torch of its own.  The runtime carries nothing between them through host
memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Library = Literal["NCCL", "RCCL", "HCCL", "oneCCL", "none"]
"""Names as a cluster file gives them; "none" for GPUs that have no library of collectives."""
LIBRARIES: tuple[Library, ...] = get_args(Library)
DEFAULT_LIBRARY: Library = "NCCL"
_CUDA = '"cuda"'


@dataclass(frozen=True)
class LibraryFacts:
    """Consequences of a library for a job.

    `device` is torch's word for its GPUs, in quotes.  ROCm's torch says "cuda" too, which is why
    Megatron and the runtime run there; on any other device they do not start.
    """

    maker: str
    device: str

    @property
    def trains(self) -> bool:
        """Return whether the runtime can train on the device, as Megatron can."""
        return self.device == _CUDA


FACTS: Mapping[Library, LibraryFacts] = {
    "NCCL": LibraryFacts("NVIDIA", _CUDA),
    "RCCL": LibraryFacts("AMD", _CUDA),
    "HCCL": LibraryFacts("Intel (Gaudi) or Huawei (Ascend)", '"hpu" or "npu"'),
    "oneCCL": LibraryFacts("Intel", '"xpu"'),
    "none": LibraryFacts("Apple or another maker", 'not "cuda"'),
}

_NAMES: Mapping[Library, re.Pattern[str]] = {
    "RCCL": re.compile(r"\b(amd|instinct|radeon)\b|^mi[0-9]{2,3}[a-z]?\b|^rx[ -]?[0-9]{4}", re.I),
    "HCCL": re.compile(r"gaudi|habana|^hl-?[0-9]{3}|ascend|^910[a-d]?\b", re.I),
    "none": re.compile(
        r"\bapple\b|^m[1-9]([ -]?(pro|max|ultra))?$|cambricon|^mlu[ -]?[0-9]|iluvatar|^bi-v[0-9]|"
        r"metax|^c5[05]0\b|moore.?threads|^mtt\b|hygon|\bdcu\b|kunlun|\bxpu\b|biren|^br10[0-9]|"
        r"enflame|\bgcu\b|trainium|inferentia|neuron|\btpu\b",
        re.I,
    ),
    "oneCCL": re.compile(r"ponte.?vecchio|\b(intel|arc)\b|\bmax[ -]?1[15][05]0\b", re.I),
    "NCCL": re.compile(
        r"nvidia|geforce|tesla|quadro|\bgrid\b|titan|(?<![a-z])[rg]tx(?![a-z])|"
        r"^(k[248]0[a-z]?|m(40|60)|p(40?|6|100)|v100s?|t4g?|a(2|10g?|16|30|40|[148]00)|"
        r"l(4|20|40[sg]?)|h(20|[128]00)|b[123]00|g[bh][123]00|rtxpro.*)(?![a-z0-9])",
        re.I,
    ),
}
"""Names by maker, tried in this order; a name of none of them has a maker that nobody here
knows."""


def library_of_name(name: str) -> Library | None:
    """Return the library that a GPU's name shows ("Gaudi-2": HCCL); None where it shows none."""
    return next((library for library, names in _NAMES.items() if names.search(name)), None)


def cannot_train(gpu_name: str, library: Library) -> str:
    """Explain in a sentence, without its end, why the runtime cannot train on a GPU; empty if it
    can."""
    facts = FACTS[library]
    if facts.trains:
        return ""
    return (
        f"{gpu_name} (library: {library}) is {facts.device} to torch, and Megatron and the runtime "
        "train on \"cuda\" alone: NVIDIA's GPUs (NCCL) and, with ROCm, AMD's (RCCL)"
    )


def mixed_libraries(places: Iterable[tuple[str, str, Library]]) -> str:
    """Explain why GPUs of several libraries cannot share a job, and what to do; empty if they can.

    Args:
        places: (node, GPU type, library) of each node of the job.
    """
    # Library -> nodes that speak it.
    nodes: dict[Library, list[str]] = {}
    for node, gpu, library in places:
        nodes.setdefault(library, []).append(f"{node} ({gpu})")
        if why := cannot_train(gpu, library):
            return f"node {node} cannot be in a job: {why}. Leave it out of the plan."
    if len(nodes) < 2:
        return ""
    sides = " and ".join(
        f"{library} of {FACTS[library].maker} on {_shown(names)}"
        for library, names in nodes.items()
    )
    return (
        f"communication libraries are mixed: {sides}. No group of torch joins them, and the "
        "runtime does not carry tensors between makers through host memory. Plan for the machines "
        "of one maker: `limits: {library: NCCL}` in the cluster file, or let `plan` choose."
    )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more nodes" if len(names) > 4 else "")
