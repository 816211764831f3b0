"""Names of cards in somebody's list: all that could be several GPUs are asked for at once."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.gpu_names import (
    MAX_NAME,
    candidates,
    find_gpu,
    near_candidates,
)
from megatron_hetero.cluster.inventory.draft import TypeDraft, made_up_name
from megatron_hetero.cluster.makers import library_of_name
from megatron_hetero.errors import ClusterError

_SHOWN = 6


class CardNames:
    """Names of a list with the meaning of each, and the ambiguous names that the user must explain.

    Args:
        means: meanings that the user gives (`--gpu-name`).
        usual: meanings that a list's own maker gives to names that could be several GPUs.
    """

    def __init__(self, means: Mapping[str, str], usual: Mapping[str, str] | None = None) -> None:
        self._means = means
        self._usual = usual or {}
        self._used: set[str] = set()
        # Name -> the line that asks for its meaning.
        self._asked: dict[str, str] = {}
        self._notes: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._means

    def find(
        self, where: str, name: str, memory_bytes: int | None = None
    ) -> tuple[str, TypeDraft | None]:
        """Find the catalogue's GPU for a name, or make up a name and an entry for the file.

        A name that could be several is remembered for `check`, and the first of them returned.

        Args:
            where: file, line and node, for the message.
            name: as the list has it ("a100", "NVIDIA-A100-SXM4-80GB").
            memory_bytes: of the GPU, where the list has it.
        Raises:
            ClusterError: `means` is no GPU of the catalogue, or no name is so long.
        """
        if len(name) > MAX_NAME:
            raise ClusterError(
                f"{where}: {name[:40]!r}... is a name of {len(name)} characters; no card has one "
                f"of more than {MAX_NAME}"
            )
        # A meaning that somebody gave comes first.
        for meanings in (self._means, self._usual):
            if name in meanings:
                self._used.add(name)
                return gpu_type(meanings[name]).name, None
        # One clear match, with a note if others are possible.
        found = find_gpu(name, memory_bytes)
        if found is not None:
            if found.others:
                self._notes[
                    f'"{name}" is taken for {found.name}; if it is {" or ".join(found.others)}, '
                    f"say --gpu-name {name}={found.others[0]}"
                ] = None
            return found.name, None
        # Several matches are asked for later, all at once.
        several = candidates(name, memory_bytes) or near_candidates(name)
        if several:
            # The first line that has the name stands in the message.
            self.ask(name, f'{where}: "{name}" could be {" or ".join(several[:_SHOWN])}')
            return several[0], None
        # Nothing matches: a type of the file's own, to be filled in.
        memory = None if memory_bytes is None else f"{memory_bytes >> 20} MiB"
        return made_up_name(name.replace("_", "-")), TypeDraft(
            memory=memory, library=library_of_name(name) or "unknown"
        )

    def ask(self, name: str, line: str) -> None:
        """Remember a name for `check`, with the line that says what is open about it."""
        self._asked.setdefault(name, line)

    def check(self) -> tuple[str, ...]:
        """Return notes on the names that were taken.

        Raises:
            ClusterError: some could be several GPUs; each is named with its place and its choices.
        """
        if self._asked:
            words = " ".join(f"--gpu-name {name}=GPU" for name in self._asked)
            raise ClusterError("\n".join(self._asked.values()) + f"\nsay which: {words}")
        # A meaning that no card needed is most likely misspelt.
        unused = [name for name in self._means if name not in self._used]
        return (
            *self._notes,
            *(f"--gpu-name {name}=...: no card of the list has this name" for name in unused),
        )


def summarised(reasons: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Write one line for each reason: the machines that share it."""
    return tuple(
        f"{names[0]} {reason}"
        if len(names) == 1
        else f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: "
        f"each {reason}"
        for reason, names in reasons.items()
    )


def num_taken(count: int) -> str:
    """Say how many machines of a list are in the file."""
    return "1 node is taken" if count == 1 else f"{count} nodes are taken"
