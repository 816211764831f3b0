"""What stock Megatron runs, as Megatron's own code says it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from megatron_hetero.flags.emit import megatron_args
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import replica_from_shape
from megatron_hetero.plan.checks.validate import first_violations, validate_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan, StageShape
from megatron_hetero.plan.stock_ranks import (
    RANK_ORDERS,
    RankOrder,
    expert_sizes,
    groups_fit,
    places_by_rank,
)
from megatron_hetero.schedule.stock import reasons_not_stock
from tests.cost.builders import make_workload

_ORDERS = {"tp-dp-pp": "tp-cp-ep-dp-pp", "tp-pp-dp": "tp-cp-ep-pp-dp"}
Sizes = tuple[int, int, int, int, int, int]
"""Tensor-parallel width, context-parallel size, stages, replicas, ep and etp."""


def all_sizes(most: int) -> Iterator[Sizes]:
    for width, context, stages, replicas in product(range(1, most + 1), repeat=4):
        ranks = width * context * stages * replicas
        if width * context * stages > most or ranks > most:
            continue
        of_stage = width * context * replicas
        for size, own in product(range(1, of_stage + 1), repeat=2):
            if size * own <= of_stage:
                yield width, context, stages, replicas, size, own


class AcceptedError(Exception):
    """Raised where Megatron begins to make groups: it has nothing against the sizes."""


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    torch = pytest.importorskip("torch")
    from megatron.core import parallel_state

    def create(*_: object, **__: object) -> None:
        raise AcceptedError

    monkeypatch.setattr(parallel_state, "create_group", create)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def megatron_takes(sizes: Sizes, order: RankOrder) -> bool:
    from megatron.core import parallel_state

    width, context, stages, replicas, size, own = sizes
    try:
        parallel_state.initialize_model_parallel(
            width,
            stages,
            context_parallel_size=context,
            expert_model_parallel_size=size,
            expert_tensor_parallel_size=own,
            order=_ORDERS[order],
            local_world_size=width * context * stages * replicas,
        )
    except AcceptedError:
        return True
    except (AssertionError, RuntimeError):
        return False
    raise AssertionError("Megatron made no group")


def we_take(sizes: Sizes, order: RankOrder) -> bool:
    """Whether a plan of these sizes is valid, and its groups of experts fit the order."""
    width, context, stages, replicas, size, own = sizes
    shape = StageShape(width, 1, context_parallel=context, expert_groups=(size, own))
    layout = "|".join([f"{','.join([str(shape)] * stages)} @1"] * replicas)
    plan = Plan(tuple(map(replica_from_shape, parse_layout(layout).replicas)))
    return not first_violations(plan) and groups_fit(shape, stages, order)


def divides(sizes: Sizes) -> bool:
    """Whether groups of experts are parts of a stage in a replica, or several of such."""
    width, context, _, _, size, own = sizes
    ranks, of_stage = size * own, width * context
    return of_stage % ranks == 0 or ranks % of_stage == 0


def check_sizes(most: int) -> None:
    seen = {True: 0, False: 0}
    for sizes in all_sizes(most):
        for order in RANK_ORDERS:
            takes = megatron_takes(sizes, order)
            seen[takes] += 1
            # The one exception: groups that begin within one replica and end within another.
            assert we_take(sizes, order) == (takes and divides(sizes)), (sizes, order)
    assert min(seen.values()) > 100


@pytest.mark.usefixtures("asks")
def test_groups_of_experts_are_those_that_megatron_takes() -> None:
    check_sizes(12)


@pytest.mark.slow
@pytest.mark.usefixtures("asks")
def test_groups_of_experts_of_up_to_32_ranks_are_those_that_megatron_takes() -> None:
    check_sizes(32)


@pytest.mark.parametrize("most", [16])
def test_ranks_are_where_megatron_has_them(most: int) -> None:
    """Tensor-parallel, context-parallel, pipeline and expert groups, rank by rank."""
    pytest.importorskip("torch")
    from megatron.core.parallel_state import RankGenerator

    num_checked = 0
    for sizes in all_sizes(most):
        width, context, stages, replicas, size, own = sizes
        for order in RANK_ORDERS:
            shape = StageShape(width, 1, context_parallel=context, expert_groups=(size, own))
            if not (divides(sizes) and groups_fit(shape, stages, order)):
                continue
            of_stage = width * context * replicas
            if of_stage % (size * own):
                continue
            num_checked += 1
            places = list(places_by_rank(order, replicas, stages, width * context))
            dense = RankGenerator(width, 1, replicas, stages, context, _ORDERS[order])
            others = of_stage // (size * own)
            routed = RankGenerator(own, size, others, stages, 1, _ORDERS[order])
            assert dense.get_ranks("pp") == routed.get_ranks("pp")
            stage, whole = width * context, size * own
            for groups, same in (
                (dense.get_ranks("tp"), [(d, p, k // width) for d, p, k in places]),
                (dense.get_ranks("cp"), [(d, p, k % width) for d, p, k in places]),
                (dense.get_ranks("dp"), [(p, k) for _, p, k in places]),
                (dense.get_ranks("pp"), [(d, k) for d, _, k in places]),
                (routed.get_ranks("tp-ep"), [(p, (d * stage + k) // whole) for d, p, k in places]),
                (routed.get_ranks("dp"), [(p, (d * stage + k) % whole) for d, p, k in places]),
            ):
                alike: dict[object, list[int]] = {}
                for rank, what in enumerate(same):
                    alike.setdefault(what, []).append(rank)
                assert sorted(alike.values()) == sorted(map(sorted, groups)), (sizes, order)
    assert num_checked > 500


def with_experts(**changes: object) -> Workload:
    workload = make_workload(num_layers=4, global_batch_size=8, micro_batch_size=1)
    model = replace(
        workload.model,
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=workload.model.ffn_hidden_size,
        add_bias_linear=False,
        seq_length=64,
    )
    training = replace(workload.training, flash_attention=True, sequence_parallel=True, **changes)  # type: ignore[arg-type]
    return replace(workload, model=model, training=training)


def stock(text: str, workload: Workload | None = None) -> Plan:
    replicas = tuple(map(replica_from_shape, parse_layout(text).replicas))
    return Plan(replicas, workload=workload or with_experts())


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("tp1cp2:4 @4 | tp1cp2:4 @4", {"--context-parallel-size": "2"}),
        (
            "tp2ep2:4 @4 | tp2ep2:4 @4",
            {"--expert-model-parallel-size": "2", "--expert-tensor-parallel-size": "1"},
        ),
        ("tp1ep2:4 @4 | tp1ep2:4 @4", {"--expert-model-parallel-size": "2"}),
        (
            "tp2ep2etp2:4 @4 | tp2ep2etp2:4 @4",
            {"--expert-model-parallel-size": "2"},
        ),
        (
            "tp1cp2ep2etp1:2,tp1cp2ep2etp1:2 @4 | tp1cp2ep2etp1:2,tp1cp2ep2etp1:2 @4",
            {"--expert-model-parallel-size": "2", "--context-parallel-size": "2"},
        ),
    ],
)
def test_equal_groups_are_flags_of_megatron(layout: str, flags: dict[str, str]) -> None:
    plan = stock(layout)
    validate_plan(plan)
    assert reasons_not_stock(plan) == ()
    words = megatron_args(plan)
    for name in (
        "--context-parallel-size",
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
    ):
        given = words[words.index(name) + 1] if name in words else None
        assert given == flags.get(name), words
    assert not any(word.startswith("--hetero") for word in words)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("tp1cp2:4 @4 | tp1cp4:4 @4", "different context-parallel sizes"),
        ("tp1cp2(3:1):4 @4 | tp1cp2(3:1):4 @4", "unequal shares of a sequence"),
        ("tp2ep2(3:1):4 @4 | tp2ep2(3:1):4 @4", "unequal numbers of experts"),
        ("tp2ep2:4 @4 | tp2:4 @4", "deal experts out differently"),
        ("tp1ep2:2,tp1ep2:2 @4 | tp1ep2:2,tp1ep2:2 @4", "groups of experts other than"),
    ],
)
def test_what_megatron_has_no_flag_for_has_a_reason(layout: str, reason: str) -> None:
    assert reason in "; ".join(reasons_not_stock(stock(layout)))


def test_megatrons_own_layers_do_not_divide_sequences() -> None:
    plan = stock("tp1cp2:4 @4 | tp1cp2:4 @4")
    workload = with_experts()
    local = replace(workload, training=replace(workload.training, flash_attention=False))
    assert reasons_not_stock(plan) == ()
    assert "Transformer Engine" in "; ".join(reasons_not_stock(replace(plan, workload=local)))
    assert "Transformer Engine" in "; ".join(reasons_not_stock(replace(plan, workload=None)))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp1ep4:4 @4 | tp1ep4:4 @4", "over 4 replicas"),
        ("tp1ep2:4 @4 | tp1ep2etp2:4 @4", "over 2 replicas, but only 1 with an equal stage 0"),
        ("tp1ep2:4 @3 | tp1ep2:4 @5", "over 2 replicas"),
        ("tp4ep3:4 @4 | tp4ep3:4 @4 | tp4ep3:4 @4", "groups of 3 ranks"),
    ],
)
def test_groups_that_ranks_do_not_make_are_refused(layout: str, words: str) -> None:
    (violation, *_) = first_violations(stock(layout))
    assert words in violation.message


def test_sizes_of_a_stage_without_groups() -> None:
    assert expert_sizes(StageShape(4, 1)) == (1, 4)
    assert expert_sizes(StageShape(4, 1, expert_shares=(1,) * 4)) == (4, 1)
