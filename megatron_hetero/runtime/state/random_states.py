"""Random states in checkpoints: each rank's own, under the place of the plan that it stands on.

Megatron keeps them in a (pipeline, tensor) grid, which cannot be ragged.  Here every state is a
small tensor of the checkpoint with a key of its own: no pickled objects, and as many places as the
plan has.  A resumed replica of the same stages goes on with the states that it had.  Any other has
no match in the checkpoint: it is seeded anew, by the job's seed and the samples consumed so far, so
that it does not repeat the masks of the first steps.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.random import (
    convert_cuda_rng_state,
    get_cuda_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
)
from megatron.training import get_args
from megatron.training.initialize import _set_random_seed
from megatron.training.utils import print_rank_0

from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Layout, Plan
from megatron_hetero.plan.ranks import Position

METADATA = "megatron_hetero_random_states"
"""Key of the checkpoint's metadata with the stages of the replicas whose states are saved."""
PREFIX = "megatron_hetero.random_states"
_TRACKER = "tracker/"


def replica_stages(plan: Plan) -> list[str]:
    """Return each replica's stages as a layout's text; replicas of equal text have equal places.

    The number and size of micro-batches are left out: they do not change the places of ranks.
    """
    return [
        format_layout(Layout((replace(shape, num_micro_batches=1, micro_batch_size=None),)))
        for shape in plan.layout.replicas
    ]


@dataclass(frozen=True)
class RandomStates:
    """The random states of the rank at `position`, to find in a checkpoint.

    `stages` is `replica_stages` of the plan.  `is_loaded` is False where the user wants none of
    the checkpoint's (`--no-load-rng`, `--finetune`).
    """

    stages: Sequence[str]
    position: Position
    is_loaded: bool

    def described(self, metadata: Mapping[str, Any] | None) -> dict[str, ShardedTensor]:
        """Describe this rank's entries of a checkpoint with `metadata`; none if it has no match."""
        if self.position.replica in self._unmatched(metadata):
            return {}
        place = self.position
        prefix = f"{PREFIX}.r{place.replica}.s{place.stage}.t{place.tensor_rank}"
        # The first context-parallel rank has the key of a plan without context parallelism.
        if place.context_rank:
            prefix += f".c{place.context_rank}"
        return {
            f"{PREFIX}.{name}": ShardedTensor.from_rank_offsets(f"{prefix}.{name}", state)
            for name, state in current_states().items()
        }

    def take(self, state_dict: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> Any:
        """Restore the states in `state_dict`, or seed anew; return its other entries."""
        own = {key: value for key, value in state_dict.items() if key.startswith(f"{PREFIX}.")}
        rest = {key: value for key, value in state_dict.items() if key not in own}
        args = get_args()
        # Megatron sets the flag itself where it begins from --pretrained-checkpoint.
        if not self.is_loaded or args.finetune:
            return rest
        if own:
            set_states({key.removeprefix(f"{PREFIX}."): value for key, value in own.items()})
        else:
            seed_anew(self.position.replica)
        unmatched = self._unmatched(metadata)
        if unmatched and (args.hidden_dropout or args.attention_dropout):
            print_rank_0(
                "> megatron-hetero: the checkpoint has no random states for replica "
                f"{', '.join(map(str, unmatched))} of this plan; dropout goes on there from a "
                "seed of its own"
            )
        return rest

    def _unmatched(self, metadata: Mapping[str, Any] | None) -> list[int]:
        stored = list((metadata or {}).get(METADATA, ()))
        return [
            r for r, stages in enumerate(self.stages) if r >= len(stored) or stored[r] != stages
        ]


def current_states() -> dict[str, torch.Tensor]:
    """Return all states that this process draws from, by name, as flat tensors on the CPU."""
    tracked = get_cuda_rng_tracker().get_states()
    return {
        "python": _of_python(random.getstate()),
        "numpy": _of_numpy(numpy.random.get_state()),
        "host": torch.get_rng_state().clone(),
        "device": torch.cuda.get_rng_state().clone(),
        **{
            f"{_TRACKER}{name}": convert_cuda_rng_state(state).clone()
            for name, state in tracked.items()
        },
    }


def set_states(states: Mapping[str, torch.Tensor]) -> None:
    """Restore the states that `current_states` returned."""
    random.setstate(_to_python(states["python"]))
    numpy.random.set_state(_to_numpy(states["numpy"]))
    torch.set_rng_state(states["host"].cpu())
    torch.cuda.set_rng_state(states["device"].cpu())
    tracker = get_cuda_rng_tracker()
    in_graphs = is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(
        {
            name.removeprefix(_TRACKER): convert_cuda_rng_state(state.cpu(), to_graphable=in_graphs)
            for name, state in states.items()
            if name.startswith(_TRACKER)
        }
    )


def seed_anew(replica: int) -> None:
    """Seed all states of a rank from another number for every position in the data."""
    args = get_args()
    words = f"{args.seed}/{args.consumed_train_samples}".encode()
    # Above 0: Megatron refuses a seed of 0.
    seed = 1 + int.from_bytes(hashlib.sha256(words).digest()[:3])
    seed_all(seed + (10 * replica if args.data_parallel_random_init else 0))


def seed_all(seed: int) -> None:
    """Seed all states as Megatron does at its start, by stage and tensor-parallel rank."""
    args = get_args()
    _set_random_seed(
        seed,
        args.data_parallel_random_init,
        args.te_rng_tracker,
        args.inference_rng_tracker,
        use_cudagraphable_rng=args.cuda_graph_impl != "none",
    )


def _of_python(state: tuple[Any, ...]) -> torch.Tensor:
    """Convert Python's (version, words, a normal number kept for later or None) to int64."""
    version, words, kept = state
    return torch.tensor([version, *words, _bits(kept)], dtype=torch.int64)


def _to_python(state: torch.Tensor) -> tuple[Any, ...]:
    version, *words, kept = state.tolist()
    return version, tuple(words), _number(kept)


def _of_numpy(state: Any) -> torch.Tensor:
    """Convert numpy's (name, words, position, has a kept number, that number) to int64."""
    _, words, position, has_kept, kept = state
    return torch.tensor([*words.tolist(), position, has_kept, _bits(kept)], dtype=torch.int64)


def _to_numpy(state: torch.Tensor) -> Any:
    *words, position, has_kept, kept = state.tolist()
    return "MT19937", numpy.array(words, dtype=numpy.uint32), position, has_kept, _number(kept)


# Stands for None among the bits of a number.
_NOTHING = float("nan")


def _bits(number: float | None) -> int:
    return int(struct.unpack("<q", struct.pack("<d", _NOTHING if number is None else number))[0])


def _number(bits: int) -> float | None:
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    # NaN alone is unequal to itself.
    return None if number != number else float(number)
