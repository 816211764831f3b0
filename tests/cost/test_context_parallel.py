"""What a stage costs whose sequences several tensor-parallel groups divide."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.memory.activations import layer_activation_bytes
from megatron_hetero.cost.memory.holdings import StateSizes, held_bytes, holdings, parts_of_plan
from megatron_hetero.cost.memory.mlp import mlp_activation_bytes
from megatron_hetero.cost.memory.states import state_bytes
from megatron_hetero.cost.memory.working import working_bytes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.collectives import all_reduce_s, ring_all_gather_s
from megatron_hetero.cost.network.seconds import boundary_time
from megatron_hetero.cost.parameters import layer_params, stage_params
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.share import TensorShare, even_share, member_shares
from megatron_hetero.cost.work.calibration import shipped_calibration
from megatron_hetero.cost.work.compute import core_attention_times, group_layer_times
from megatron_hetero.cost.work.context_parallel import merging_times, waiting_times
from megatron_hetero.cost.work.speed import speed_of
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.sharding.stage_ranges import StageRanks, pieces
from megatron_hetero.plan.sharding.token_shares import token_counts
from megatron_hetero.schedule.simulator.step import simulate_plan
from tests.cost.builders import (
    BETWEEN,
    FAST,
    INSIDE,
    SLOW,
    estimate_plan,
    make_cluster,
    make_workload,
    place,
)

CLUSTER = make_cluster(("a", FAST, 8), ("b", SLOW, 8))


def long_sequences(**changes: object) -> Workload:
    return make_workload(seq_length=16384, max_position_embeddings=16384, **changes)


def test_context_parallel_ranks_divide_all_work_evenly() -> None:
    workload = long_sequences(hidden_size=4096)
    whole = even_share(workload.model, 1)
    part = member_shares(workload.model, 1, None, 4)[0]
    core, of_all = (core_attention_times(workload, [(FAST, share)]) for share in (part, whole))
    layer, of_all_layer = (group_layer_times(workload, [(FAST, s)]) for s in (part, whole))
    # A call of fused attention has a fixed cost, however small it is; a ring has four, and shorter
    # sequences in each.
    calibration = shipped_calibration()
    call_s = calibration.attention.call_s["forward"]
    efficiency = {
        length: calibration.attention_efficiency(FAST, workload.model.kv_channels, length).forward
        for length in (4096, 16384)
    }
    slower = efficiency[16384] / efficiency[4096]
    assert core.forward_s - 4 * call_s == pytest.approx(slower * (of_all.forward_s - call_s) / 4)
    # Products have one as well, read all weights, and short ones run at a higher clock.
    assert layer.forward_s == pytest.approx(of_all_layer.forward_s / 4, rel=0.05)


def test_unlike_shares_divide_attention_as_they_divide_tokens() -> None:
    workload = long_sequences(hidden_size=4096)
    parts = member_shares(workload.model, 1, None, 2, context_shares=(3, 1))
    assert [share.num_tokens(workload.model, workload.training) for share in parts] == [12288, 4096]
    three, one = (core_attention_times(workload, [(FAST, share)]) for share in parts)
    call_s = shipped_calibration().attention.call_s["forward"]
    assert three.forward_s - call_s == pytest.approx(3 * (one.forward_s - call_s))


def test_a_ring_merges_what_its_rounds_give() -> None:
    """Two ranks of 16 tokens: keys and values of 8 elements each, queries of 16, two bytes each."""
    workload = make_workload(
        seq_length=32, hidden_size=32, num_attention_heads=4, num_query_groups=2
    )
    share = member_shares(workload.model, 1, None, 2)[0]
    found = merging_times(workload, [(FAST, share)])
    forward, backward = 2 * 16 + 5 * 16, 4 * 16 + 2 * 16 + 3 * 16 + 1.5 * 16
    memory_s = speed_of(workload.training, FAST).memory_s
    assert found.forward_s == pytest.approx(memory_s(2 * 16 * forward))
    assert found.backward_s == pytest.approx(memory_s(2 * 16 * backward))
    whole = even_share(workload.model, 1)
    assert merging_times(workload, [(FAST, whole)]).total_s == 0.0


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_exchanged_heads_travel_before_attention_and_after_it(recompute: str) -> None:
    """Queries, keys, values and the result, three of four parts each, and nothing hides them."""
    ring = long_sequences(num_query_groups=4, recompute=recompute)
    heads = long_sequences(num_query_groups=4, recompute=recompute, cp_comm_type="a2a")
    share = member_shares(ring.model, 1, None, 4)[0]
    members, link = [(FAST, share)], Link(1e9, 0.0)
    elements = 2 * ring.model.hidden_size + 2 * 4 * ring.model.kv_channels
    sent = share.num_tokens(ring.model, ring.training) * elements * 2 * 3 / 4
    waits = waiting_times(heads, members, link)
    assert waits.forward_s == pytest.approx(sent / link.ring_bytes_per_s(4))
    times = 2 if recompute == "selective" else 1
    assert waits.backward_s == pytest.approx(times * waits.forward_s)
    # One call on whole sequences is no slower than four, and each tensor is moved twice.
    core = [core_attention_times(workload, members) for workload in (ring, heads)]
    assert core[1].forward_s < core[0].forward_s
    moved = merging_times(heads, members).forward_s
    speed = speed_of(heads.training, FAST)
    assert moved == pytest.approx(speed.memory_s(4 * elements * 2 * 16384 / 4))
    # Unlike parts, and local layers, gather keys and values whatever the flag says.
    unlike = [(FAST, replace(share, context_shares=(1, 1, 1, 3)))]
    assert waiting_times(heads, unlike, link) == waiting_times(ring, unlike, link)
    local = replace(heads, training=replace(heads.training, flash_attention=False))
    assert merging_times(local, members).total_s == 0.0


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_transformer_engine_gathers_keys_and_values_in_either_pass(recompute: str) -> None:
    """Each by itself, three of four parts, and their gradients once; nothing hides them."""
    flags = {"num_query_groups": 4, "recompute": recompute, "cp_comm_type": "all_gather"}
    job = long_sequences(**flags)
    share = member_shares(job.model, 1, None, 4)[0]
    members, link = [(FAST, share)], Link(1e9, 1e-5)
    each_s = ring_all_gather_s(2.0 * 16384 * 4 * job.model.kv_channels, 4, link)
    waits = waiting_times(job, members, link)
    assert waits.forward_s == pytest.approx(2 * each_s)
    # Gathered and reduced backward, and once more where attention is recomputed.
    times = 3 if recompute == "selective" else 2
    assert waits.backward_s == pytest.approx(times * waits.forward_s)
    # Two calls, of the queries of a rank's two chunks and all keys before them.
    heads = replace(job, training=replace(job.training, cp_comm_type="a2a"))
    calibration = shipped_calibration().attention.call_s
    core, of_heads = (core_attention_times(workload, members) for workload in (job, heads))
    assert core.forward_s - of_heads.forward_s == pytest.approx(calibration["forward"])
    # Unlike parts, and local layers, gather keys and values once whatever the flag says.
    ring = replace(job, training=replace(job.training, cp_comm_type="p2p"))
    unlike = [(FAST, replace(share, context_shares=(1, 1, 1, 3)))]
    assert waiting_times(job, unlike, link) == waiting_times(ring, unlike, link)


def test_what_gathered_keys_move_and_take() -> None:
    """Two ranks of 16 tokens: keys and values of 8 elements each, queries of 16, two bytes each;
    the keys and values of all 32 tokens are put in order, and their gradients made and so too."""
    workload = make_workload(
        seq_length=32, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=8,
        cp_comm_type="all_gather",
    )  # fmt: skip
    model, training = workload.model, workload.training
    share = member_shares(model, 1, None, 2)[0]
    found = merging_times(workload, [(FAST, share)])
    whole, queries = 32 * 16, 16 * 16
    in_order = 2 * whole
    # The result is made of zeros, and of copies of both chunks'.
    forward = in_order + (1 + 2) * queries
    # Gradients of keys and values: zeros, to which both chunks' are added (3 of 4 parts of the
    # sequence's, and 2), then the order of ranks; those of queries are copied.
    added = 3 * (whole * 5 // 4)
    backward = in_order + whole + added + in_order + 2 * queries
    memory_s = speed_of(training, FAST).memory_s
    assert found.forward_s == pytest.approx(memory_s(2 * forward))
    assert found.backward_s == pytest.approx(memory_s(2 * backward))
    # Backward all of it lives at once, beside the two gradients.
    ring = replace(training, cp_comm_type="p2p")
    held = 2 * (whole + whole + whole * 5 // 4)
    let_go = mlp_activation_bytes(model, training, share, frozenset())
    assert working_bytes(model, training, share, True) == held - let_go
    assert working_bytes(model, ring, share, True) < held - let_go
    assert working_bytes(model, training, share, False) >= working_bytes(model, ring, share, False)


def test_local_layers_that_divide_sequences_store_no_scores() -> None:
    stored = long_sequences(flash_attention=False, attention_dropout=0.0)
    fused = long_sequences(flash_attention=False, attention_dropout=0.0, fused_scores="divided")
    whole, part = (member_shares(stored.model, 1, None, count)[0] for count in (1, 2))

    def kept(workload: Workload, share: TensorShare) -> int:
        model, training = workload.model, workload.training
        return layer_activation_bytes(model, training, share, False, "none")

    assert kept(fused, whole) == kept(stored, whole)
    model = stored.model
    scores = 8192 * 16384 * (2 * model.num_attention_heads + 1)  # and the mask
    context_and_sums = 8192 * (2 * model.hidden_size + 4 * model.num_attention_heads)
    assert kept(stored, part) - kept(fused, part) == scores - context_and_sums
    times = [core_attention_times(w, [(FAST, part)]).total_s for w in (stored, fused)]
    assert times[1] < times[0] / 2


@pytest.mark.parametrize("layout", ["tp1cp2{}:4 @4", "tp2cp2{}:4 @4"])
def test_a_stage_lasts_as_long_as_its_slowest_group(layout: str) -> None:
    """A fast and a slow machine: a layer takes the longer of the two groups with their own tokens,
    and the gather as long as the longest piece."""
    width = int(layout[2])
    workload = long_sequences(flash_attention=False, sequence_parallel=True)
    cluster = make_cluster(("a", FAST, width), ("b", SLOW, width))
    times = {}
    for shares in ("", "(1:1)", "(3:1)", "(2:1)"):
        plan = place(layout.format(shares), workload, cluster)
        placed = placement_of(plan, cluster).replicas[0].stages[0]
        times[shares] = CostModel(cluster, workload).stage_pieces(placed, 1024)
    assert times["(1:1)"] == times[""]
    assert times["(3:1)"].layer.total_s < times[""].layer.total_s
    members = member_shares(workload.model, width, None, 2, None, (2, 1))
    own = [
        group_layer_times(workload, [(gpu, members[first])] * width)
        for gpu, first in ((FAST, 0), (SLOW, width))
    ]
    tokens = token_counts(16384, (2, 1), width)
    gather_s = ring_all_gather_s(2 * 2 * max(tokens) * 512 // width * 2, 2, BETWEEN)
    # Attention and the MLP each gather and scatter, which are an all-reduce of a ring.
    collectives_s = [2 * all_reduce_s(2.0 * n * 512, width, INSIDE) for n in tokens]
    slowest_s = max(t.forward_s + c for t, c in zip(own, collectives_s, strict=True))
    assert times["(2:1)"].layer.forward_s == pytest.approx(slowest_s + gather_s)


def test_a_ring_hides_behind_attention_and_gathering_does_not() -> None:
    """Keys and values of 32,768 tokens cross a node's links in less than attention takes; over a
    slow link they do not; where they are gathered the layer waits for all of them."""
    length = {"seq_length": 32768, "max_position_embeddings": 32768}
    stage = place("tp1cp4:4 @4", make_workload(**length), CLUSTER)
    slow = make_cluster(*((f"n{i}", FAST, 1) for i in range(4)), between=Link(1e8, 1e-5))

    def communication(flash: bool, cluster: object = CLUSTER) -> tuple[float, float]:
        workload = make_workload(**length, flash_attention=flash)
        costs = CostModel(cluster, workload)  # type: ignore[arg-type]
        plan = stage if cluster is CLUSTER else place("tp1cp4:4 @4", workload, slow)
        placed = placement_of(plan, cluster).replicas[0].stages[0]  # type: ignore[arg-type]
        times = costs.stage_pieces(placed, 1024).communication
        return times.forward_s, times.backward_s

    num_bytes = 2 * 32768 * 512 * 2
    assert communication(True) == (0.0, 0.0)
    once_s = ring_all_gather_s(num_bytes, 4, INSIDE)
    assert communication(False) == pytest.approx((once_s, once_s))
    slow_s = ring_all_gather_s(num_bytes, 4, Link(1e8, 1e-5))
    forward_s, backward_s = communication(True, slow)
    assert 0.8 * slow_s < forward_s < slow_s and 1.8 * slow_s < backward_s < 2 * slow_s


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_a_boundary_carries_what_the_runtime_sends(
    from_width: int, to_width: int, from_context: int, to_context: int
) -> None:
    """Seconds of the busiest card and port, from the runtime's own table of pieces."""
    num_senders, num_receivers = from_width * from_context, to_width * to_context
    cluster = make_cluster(("a", FAST, 12), ("b", SLOW, 12))
    senders = cluster.devices[:num_senders]
    whole = 2 * 3 * 4 * num_senders * num_receivers
    there = StageRanks(tuple(range(100, 100 + num_receivers)), to_context)
    here = StageRanks(tuple(range(num_senders)), from_context)
    sent = {
        i: sum(p.stop - p.start for p in pieces(whole, here, i, there)) for i in range(num_senders)
    }
    assert sum(sent.values()) == whole
    for receivers, busy_s in (
        (cluster.devices[12 : 12 + num_receivers], whole / BETWEEN.bytes_per_s),
        (
            cluster.devices[12 - num_receivers : 12],
            whole / min(num_senders, num_receivers) / INSIDE.bytes_per_s,
        ),
    ):
        if receivers[0] in senders:
            continue
        time = boundary_time(cluster, senders, receivers, whole, True, (from_context, to_context))
        assert time.serialisation_s == pytest.approx(busy_s)


def test_a_boundary_of_unlike_shares_carries_what_the_runtime_sends() -> None:
    """Sent by (12, 4) tokens of 16 to (8, 8): 12 and 4 leave, 8 each arrive, over cards' links."""
    cluster = make_cluster(("a", FAST, 4))
    a, b = cluster.devices[:2], cluster.devices[2:]
    for senders, receivers, tokens in ((a, b, ((12, 4), None)), (b, a, (None, (12, 4)))):
        time = boundary_time(cluster, senders, receivers, 16e9, True, (2, 2), tokens)
        assert time.serialisation_s == pytest.approx(12e9 / INSIDE.bytes_per_s)
    # Without sequence parallelism a group gathers its own tokens.
    eight = make_cluster(("a", FAST, 8))
    one, two = eight.devices[:1], eight.devices[1:5]
    latency_s = boundary_time(eight, one, two, 16e9, False, (1, 2), (None, (12, 4))).latency_s
    gather_s = ring_all_gather_s(12e9, 2, INSIDE)
    assert latency_s == pytest.approx(INSIDE.latency_s + gather_s)


@pytest.mark.parametrize("divided", [False, True])
def test_groups_of_a_stage_exchange_gradients_as_replicas_do(divided: bool) -> None:
    """Two groups of one stage, and two replicas of one group each, hold the same weights."""
    workload = make_workload(use_distributed_optimizer=divided)
    plans = [place(layout, workload, CLUSTER) for layout in ("tp2cp2:4 @4", "tp2:4 @2 | tp2:4 @2")]
    syncs = [estimate_plan(plan, CLUSTER).gradient_sync_s for plan in plans]
    assert syncs[0] == pytest.approx(syncs[1]) and syncs[0] > 0
    simulated = [simulate_plan(plan, CLUSTER, is_stock=False) for plan in plans]
    assert simulated[0].gradient_sync_s == pytest.approx(simulated[1].gradient_sync_s)


def test_states_are_divided_among_all_groups_that_hold_a_layer() -> None:
    workload = make_workload(use_distributed_optimizer=True, tied_embeddings=False)
    plan = place("tp1cp2:2,tp2:2 @2 | tp1:4 @2", workload, CLUSTER)
    model, states = workload.model, state_bytes(workload.training)
    devices = estimate_plan(plan, CLUSTER).devices
    optimizer = [devices[f"a:{i}"].parts_bytes["optimizer"] for i in range(5)]
    whole = stage_params(model, even_share(model, 1), 4, True, True, 1024) * states.optimizer
    # What a group of two holds in equal copies (norms, biases) is counted on both.
    assert whole <= sum(optimizer) <= 1.01 * whole
    layer = layer_params(model, even_share(model, 1)) * states.optimizer
    first = stage_params(model, even_share(model, 1), 0, True, False, 1024) * states.optimizer
    assert optimizer[0] == optimizer[1] == pytest.approx((2 * layer + first) / 3, abs=3)
    sizes = StateSizes(workload)
    kept = holdings(workload, parts_of_plan(plan))
    each = [held_bytes(sizes, kept[f"a:{i}"]) for i in range(5)]
    only = {
        device: {t: v for t, v in tensors.items() if t[2] == "optimizer"}
        for device, tensors in kept.items()
    }
    assert sum(held_bytes(sizes, tensors) for tensors in only.values()) == pytest.approx(
        sum(sizes.bytes_of(t) for t in {t for tensors in only.values() for t in tensors})
    )
    assert each[0] == each[1]


def test_simulation_and_formula_agree() -> None:
    workload = long_sequences(num_layers=8, global_batch_size=8, flash_attention=False)
    for layout in ("tp2cp2(3:1):5,tp1:3 @8", "tp1cp4:5,tp2cp2(1:2):3 @8", "tp2cp4:8 @8"):
        plan = place(layout, workload, CLUSTER)
        assert simulate_plan(plan, CLUSTER).step_time_s == pytest.approx(
            estimate_plan(plan, CLUSTER).step_time_s, rel=0.01
        )


def test_longer_sequences_of_more_ranks_take_the_memory_of_one() -> None:
    """Four times the tokens on four groups: the same activations, but for what attention keeps of
    whole sequences."""
    short = make_workload(seq_length=4096, max_position_embeddings=16384)
    long = replace(short, model=replace(short.model, seq_length=16384))
    parts = [
        estimate_plan(place(layout, workload, CLUSTER), CLUSTER).devices["a:0"].parts_bytes
        for layout, workload in (("tp1:4 @4", short), ("tp1cp4:4 @4", long))
    ]
    assert parts[0]["activations"] == parts[1]["activations"]
