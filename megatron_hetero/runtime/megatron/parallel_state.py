"""Values of this rank's groups for the globals of `megatron.core.parallel_state`.

`pretrain` takes our groups as an argument, yet Megatron still asks the globals in places that have
no argument: the optimizer is built without a collection, the vocabulary-parallel cross entropy and
the layer offsets ask for ranks, the logs ask for sizes. Public setters are used where there are
any; nothing of Megatron's is replaced.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_hetero.errors import MegatronVersionError
from megatron_hetero.model.megatron_release import INSTALL, RELEASE
from megatron_hetero.runtime.parallel.groups import RankGroups

_PIPELINE = ("_PIPELINE_MODEL_PARALLEL_GROUP",)
_TENSOR = ("_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_AND_DATA_PARALLEL_GROUP")
_STAGE = ("_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP")
# Norms, found-inf flags and step decisions are agreed by the whole job: a replica that clipped or
# skipped alone would drift from the others.
_WORLD = (
    "_MODEL_PARALLEL_GROUP",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
)
# Megatron's own data parallelism is switched off: `runtime.gradients.sync` reduces across replicas.
_ALONE = (
    "_DATA_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP_WITH_CP",
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_GTP_WEIGHT_REMAT_GROUP",
    "_EXPERT_GTP_WEIGHT_REMAT_GROUP",
)


def fill(groups: RankGroups) -> None:
    """Make every question that Megatron asks `parallel_state` answer for this rank's place.

    Raises:
        MegatronVersionError: Megatron lacks a global that this package sets.
    """
    rank = dist.get_rank()
    values = (
        (_PIPELINE, groups.pipeline),
        (_TENSOR, groups.tensor),
        (("_EXPERT_MODEL_PARALLEL_GROUP",), groups.experts),
        (("_EXPERT_TENSOR_PARALLEL_GROUP",), groups.expert_parts),
        (("_CONTEXT_PARALLEL_GROUP",), groups.context),
        (("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",), groups.expert_ranks),
        (_STAGE, groups.stage),
        (_WORLD, groups.world),
        (_ALONE, groups.alone),
        (("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",), list(groups.tensor_ranks)),
        (("_DATA_PARALLEL_GLOBAL_RANKS", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"), [rank]),
        (("_CONTEXT_PARALLEL_GLOBAL_RANKS",), list(groups.context_ranks)),
        (("_EXPERT_MODEL_PARALLEL_RANKS",), dist.get_process_group_ranks(groups.experts)),
        (("_GTP_WEIGHT_REMAT_GLOBAL_RANKS", "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS"), [rank]),
        (("_MODEL_PARALLEL_GLOBAL_RANKS",), list(range(dist.get_world_size()))),
    )
    # Most of these globals have no setter.
    for names, value in values:
        for name in names:
            if not hasattr(mpu, name):
                raise MegatronVersionError(
                    f"megatron.core.parallel_state has no {name}; this package was written for "
                    f"megatron-core {RELEASE}. Install a tested release: {INSTALL}."
                )
            setattr(mpu, name, value)
    mpu.set_tensor_model_parallel_world_size(groups.tensor.size())
    mpu.set_tensor_model_parallel_rank(groups.tensor.rank())
    mpu.set_pipeline_model_parallel_world_size(groups.pipeline.size())
    mpu.set_pipeline_model_parallel_rank(groups.pipeline.rank())
    # Model chunks of this stage; Megatron writes a single one as None.
    num_chunks = groups.chain.count(groups.pipeline.stage)
    mpu.set_virtual_pipeline_model_parallel_world_size(num_chunks if num_chunks > 1 else None)
    mpu.set_expert_model_parallel_world_size(groups.experts.size())
    mpu.set_expert_model_parallel_rank(groups.experts.rank())
    mpu.set_expert_tensor_parallel_world_size(groups.expert_parts.size())
    mpu.set_expert_tensor_parallel_rank(groups.expert_parts.rank())
    # Every data-parallel group is this rank alone.
    mpu.set_data_parallel_rank(0)
    # Megatron makes this buffer together with its groups, which it does not make here.
    if mpu._GLOBAL_MEMORY_BUFFER is None:
        mpu._set_global_memory_buffer()
