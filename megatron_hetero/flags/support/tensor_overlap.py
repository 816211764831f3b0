"""Plans on which `--tp-comm-overlap` can be followed: what Transformer Engine's buffers ask for.

Transformer Engine exchanges tensors under products in buffers that the GPUs of a tensor-parallel
group write into each other (`initialize_ub`), so the group is of one machine, and all members have
equally much.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.plan.plan import Plan

FLAG = "--tp-comm-overlap"


def check_tensor_overlap(plan: Plan, *, transformer_impl: str, is_bf16: bool) -> None:
    """Refuse a plan whose stages cannot exchange tensors under products.

    Args:
        plan: the plan, of a job with the flag.
        transformer_impl: `--transformer-impl`.
        is_bf16: `--bf16`; Megatron makes the buffers in that type.
    Raises:
        UnsupportedError: the message names the flag, every cause with its stage, and advice.
    """
    # All causes together, so that one run shows them all.
    found = []
    if transformer_impl != "transformer_engine":
        found.append(f"--transformer-impl {transformer_impl}: only Transformer Engine overlaps")
    if not is_bf16:
        found.append("no --bf16: Megatron makes the buffers of the exchange in bf16")
    found += _stages(plan)
    if found:
        raise UnsupportedError(
            f"{FLAG} cannot be followed here:\n  "
            + "\n  ".join(found)
            + f"\nLeave {FLAG} out, or change these."
        )


def _stages(plan: Plan) -> Iterator[str]:
    """Name the stages whose tensor-parallel groups have no such buffers."""
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            where, width = f"replica {r}, stage {s}", stage.shape.tensor_parallel
            if width > 1 and stage.shape.shares is not None:
                yield f"{where}: unequal shares, whose buffers Transformer Engine cannot divide"
            # Groups of consecutive GPUs, one for each context-parallel rank.
            groups = [
                stage.devices[first : first + width]
                for first in range(0, len(stage.devices), width)
            ]
            if any(len({device.rpartition(":")[0] for device in g}) > 1 for g in groups):
                yield f"{where}: a tensor-parallel group over several machines"


def check_tensor_overlap_of_job(plan: Plan) -> None:
    """Refuse as `check_tensor_overlap`, when a plan becomes flags; a bare layout has no job yet."""
    if plan.workload is None or FLAG not in plan.workload.megatron_args:
        return
    training = plan.workload.training
    check_tensor_overlap(
        plan,
        transformer_impl=_implementation(plan.workload.megatron_args),
        is_bf16=training.precision == "bf16",
    )


def _implementation(megatron_args: tuple[str, ...]) -> str:
    """Return `--transformer-impl` of a job, by default Megatron's."""
    found = "transformer_engine"
    # The last occurrence holds, in either form.
    for word, value in zip(megatron_args, (*megatron_args[1:], ""), strict=True):
        if word == "--transformer-impl":
            found = value
        elif word.startswith("--transformer-impl="):
            found = word.partition("=")[2]
    return found
