"""Changes of a job and a cluster that were tried when nothing fits, in words."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_hetero.errors import some_of
from megatron_hetero.planner.advise.capacity import MoreGpus
from megatron_hetero.planner.advise.nothing_fits.relaxations import Settings


@dataclass
class Tries:
    """Changes planned with no plan found, and changes proved not to fit. `settings` and `limits`
    are changes in words; `counts[words]` are the numbers of GPUs added, keyed by the kind of node
    and the other changes; `proved` is the largest number proved not to fit, by the same key.
    """

    settings: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    counts: dict[str, list[int]] = field(default_factory=dict)
    proved: dict[str, int] = field(default_factory=dict)

    def failed(self, settings: Settings, more: MoreGpus) -> None:
        """No plan was found with these GPUs added."""
        self.counts.setdefault(_what(settings, more), []).append(more.num_gpus)

    def excluded(self, settings: Settings, most: MoreGpus) -> None:
        """Record the proof that no plan fits with this many GPUs added, or fewer."""
        self.proved[_what(settings, most)] = most.num_gpus

    def words(self) -> str:
        """Return all that was tried, and how far."""
        tried = [
            some_of(list(dict.fromkeys(what)), "; ")
            for what in (self.settings, self.limits)
            if what
        ]
        tried += [
            what.format(n=", ".join(map(str, sorted(counts))))
            for what, counts in self.counts.items()
        ]
        sentences = ["No relaxation that was tried fits."]
        if tried:
            sentences.append(f"Tried: {'; '.join(tried)}.")
        if self.proved:
            proved = [what.format(n=f"up to {most}") for what, most in self.proved.items()]
            sentences.append(f"Proved not to fit: {some_of(proved, '; ')}.")
        sentences.append(
            "`megatron-hetero plan --memory` lists how many GPUs of each type hold this model."
        )
        return " ".join(sentences)


def _what(settings: Settings, more: MoreGpus) -> str:
    node = more.node
    words = f"{{n}} more {node.gpu_type.name} in nodes of {node.num_gpus}"
    return f"{words} with {settings.words}" if settings.words else words
