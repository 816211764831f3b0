"""Every symbol of Megatron that this package replaces, watches or rebuilds, checked at once.

`check_symbols` runs before the ranks of a job meet, so that a Megatron that is not known ends in a
message and not, on some rank and after minutes, in a wait.  `tools/canary.py` compares the same
list with the sources of another release.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

import megatron_hetero.runtime.megatron as room
from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.guarded import Guarded
from megatron_hetero.runtime.megatron.replace import Replacement

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def _known(module: str, name: str, reason: str, known: str, is_stock: bool = False) -> Guarded:
    return Guarded(module, name, reason, {known: TESTED}, is_stock)


OBSERVED = (
    # Globals that a plan's groups are put into.
    _known(
        "megatron.core.parallel_state",
        "",
        "the groups of a plan are put into its globals",
        "8978e30f2f7477d6",
    ),
    _known(
        "megatron.core.parallel_state",
        "initialize_model_parallel",
        "the globals that it would set are set by the plan",
        "6e1200b46fab6634",
    ),
    # Calls of the executor, which runs the orders of a plan.
    _known(
        _SCHEDULES,
        "forward_step",
        "orders of a plan call it, and it is timed",
        "24c526af44458ac2",
        True,
    ),
    _known(
        _SCHEDULES,
        "backward_step",
        "orders of a plan call it, and it is timed",
        "435628e2479e62f2",
        True,
    ),
    _known(_SCHEDULES, "get_tensor_shapes", "orders of a plan ask it", "aafd487b2ecd6cf8"),
    _known(_SCHEDULES, "check_first_val_step", "orders of a plan ask it", "04a8a2d43b70ed39"),
    _known(
        _SCHEDULES,
        "deallocate_output_tensor",
        "orders of a plan free memory by it",
        "ec45aab59f2784a1",
    ),
    _known(
        "megatron.core.optimizer.optimizer",
        "ChainedOptimizer.step",
        "a timeline times it",
        "c2b301e02ec29f4e",
        True,
    ),
    # Routing losses of the log.
    _known(
        "megatron.core.transformer.moe.moe_logging",
        "MoEMetricsTracker",
        "the routing losses of unlike replicas are summed in a subclass",
        "3ef6cfe2440c75b5",
    ),
    _known(
        "megatron.core.transformer.moe.moe_logging",
        "set_moe_metrics_tracker",
        "that subclass is put in by it",
        "89813789ab184c66",
    ),
    # Gradients outside of Megatron's own buffers and passes.
    _known(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.check_grads",
        "gradients of our own buckets are checked by it",
        "94e99add61f34256",
    ),
    _known(
        "megatron.core.utils",
        "prepare_input_tensors_for_wgrad_compute",
        "weight gradients that were put off begin with it",
        "79c20a0283c05c6e",
    ),
    _known(
        "megatron.core.utils",
        "StragglerDetector.configure",
        "it is called before Megatron's loop would",
        "5fc3885c83316c2a",
    ),
    # Random states, of resumed ranks and on a CPU.
    _known(
        "megatron.training.initialize",
        "_set_random_seed",
        "ranks without a saved random state are seeded by it",
        "0c3ce388d8b12e69",
    ),
    _known(
        "megatron.core.transformer.dot_product_attention",
        "DotProductAttention",
        "divided sequences are attended to in a subclass",
        "cb919ef68d076f98",
    ),
    _known(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        "a CPU has another generator",
        "aa26caaa069c5c4f",
        True,
    ),
    _known(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        "a CPU has another generator",
        "b179c9d95438b61c",
        True,
    ),
)
"""Symbols used without a `Replacement`, whose source has to be as read."""


_checked: set[tuple[str, str]] = set()
"""Symbols that were known in this process: ranks that are forked need not read them again."""


def replaced() -> tuple[Guarded, ...]:
    """Return every `Replacement` of the files of this folder, by the files' names."""
    # All files of this folder and of the folders in it.
    found = pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    modules = [import_module(name) for name in sorted(module.name for module in found)]
    values = [value for module in modules for value in vars(module).values()]
    replacements = [value for value in values if isinstance(value, Replacement)]
    return tuple({(r.module, r.name): r for r in replacements}.values())


def guarded() -> tuple[Guarded, ...]:
    """Return all guarded symbols, the replaced ones first."""
    return (*replaced(), *OBSERVED)


def check_symbols(*, is_stock: bool) -> None:
    """Check every guarded symbol that a job touches.

    Args:
        is_stock: the job is all stock Megatron's, which touches few of them.
    Raises:
        MegatronVersionError: names the first symbol that is not known, and what to install.
    """
    for symbol in guarded():
        key = (symbol.module, symbol.name)
        if (symbol.is_stock or not is_stock) and key not in _checked:
            symbol.check()
            _checked.add(key)
