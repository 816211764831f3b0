"""torchrun lines: one for each node, with its own number of processes, in rank order."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import PlanFormatError, UsageError
from megatron_hetero.flags.launch import (
    RankRow,
    check_hosts,
    node_launches,
    rank_rows,
)
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from tests.flags.test_stock import placed
from tests.plan.edits import PLAN, with_host
from tests.plan.strategies import placed_plans, workload

USER = " ".join(workload().megatron_args)


def torchrun_lines(plan: Plan, path: str | None = None, **options: int) -> tuple[str, ...]:
    return tuple(launch.line for launch in node_launches(plan, path, **options))


def test_one_line_for_each_node_with_its_own_number_of_gpus() -> None:
    common = f"-m megatron_hetero.pretrain_gpt {USER} --hetero-plan plan.json"
    # Unlike GPUs may not choose unlike algorithms; RTX 4090s have no peer-to-peer.
    all_nodes = (
        "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_ALGO=Ring "
        "NCCL_PROTO=Simple"
    )
    assert torchrun_lines(PLAN, "plan.json") == (
        f"{all_nodes} CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nnodes 2 "
        "--node-rank 0 --nproc-per-node 4 --master-addr a.example --master-port 29500 " + common,
        f"{all_nodes} NCCL_P2P_DISABLE=1 CUDA_VISIBLE_DEVICES=0,2 torchrun --nnodes 2 "
        "--node-rank 1 --nproc-per-node 2 --master-addr a.example --master-port 29500 " + common,
    )


ONE = "--rdzv-backend c10d --rdzv-conf store_type=file --local-addr localhost"
NO_PORT = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def test_a_stock_plan_starts_megatrons_own_script() -> None:
    line, _ = torchrun_lines(placed(["a:0", "b:0", "a:1", "b:1"], a=2, b=2))
    assert f" --master-port 29500 pretrain_gpt.py {USER} --tensor-model-parallel-size 1" in line
    assert "hetero" not in line


def test_one_node_needs_no_address() -> None:
    (line,) = torchrun_lines(placed(["a:1", "a:0", "a:3", "a:2"], a=4))
    assert line.startswith(
        f"CUDA_DEVICE_ORDER=PCI_BUS_ID {NO_PORT} CUDA_VISIBLE_DEVICES=1,0,3,2 "
        f"torchrun {ONE} --nproc-per-node 4 pretrain_gpt.py "
    )


def test_a_bare_layout_starts_anywhere() -> None:
    plan = plan_from_layout(parse_layout("tp2:4,tp1:4 @16"), workload())
    (launch,) = node_launches(plan)
    assert launch.host is None
    assert launch.line == (
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 {NO_PORT} torchrun {ONE} --nproc-per-node 3 "
        f"-m megatron_hetero.pretrain_gpt {USER} "
        "--hetero-layout 'tp2:4,tp1:4 @16'"
    )


@settings(max_examples=50)
@given(placed_plans())
def test_lines_start_every_rank_on_its_gpu(planned: tuple[Plan, Cluster]) -> None:
    plan, _ = planned
    launches = node_launches(plan, "plan.json")
    devices = []
    for launch, host in zip(launches, plan.hosts, strict=True):
        assert launch.host == host.host
        environment = dict(launch.environment)
        indices = environment["CUDA_VISIBLE_DEVICES"].split(",")
        argv = launch.argv
        assert argv[argv.index("--nproc-per-node") + 1] == str(len(indices))
        assert shlex.split(launch.line) == [*(f"{k}={v}" for k, v in environment.items()), *argv]
        devices += [f"{host.node}:{index}" for index in indices]
    assert devices == [place.device for place in rank_table(plan)]


def test_rank_rows() -> None:
    rows = rank_rows(PLAN)
    assert [row.rank for row in rows] == list(range(6))
    assert rows[4] == RankRow(4, 1, 0, "b.example", "RTX-4090", 0, 0, 1, 0)
    assert rows[5] == RankRow(5, 1, 1, "b.example", "RTX-4090", 2, 1, 0, 0)
    bare = rank_rows(plan_from_layout(parse_layout("tp2:4,tp1:4 @16")))
    assert bare[2] == RankRow(2, 0, 2, None, None, None, 0, 1, 0)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (with_host(PLAN, 0, host="0.0.0.0"), "no address of one machine"),
        (with_host(PLAN, 0, host="::"), "no address of one machine"),
        (with_host(PLAN, 1, host="8.8.8.8"), "a public address"),
        (with_host(PLAN, 1, host="-oProxyCommand=x"), "not a host name"),
        (
            with_host(PLAN, 1, host="a.example"),
            "machines a and b both start a process on GPU 0 of host a.example",
        ),
    ],
)
def test_hosts_that_cannot_be_used_are_refused(plan: Plan, says: str) -> None:
    with pytest.raises(PlanFormatError, match=says):
        torchrun_lines(plan, "plan.json")


def test_private_addresses_are_fine() -> None:
    plan = with_host(PLAN, 0, host="10.1.2.3")
    assert "--master-addr 10.1.2.3 " in torchrun_lines(plan, "plan.json")[1]


def test_the_port_is_checked() -> None:
    assert "--master-port 1234 " in torchrun_lines(PLAN, "p.json", master_port=1234)[0]
    with pytest.raises(UsageError, match="master port 80; allowed is 1024 to 65535"):
        torchrun_lines(PLAN, "p.json", master_port=80)


def test_contradictions_are_refused_here_too() -> None:
    load = replace(workload(), megatron_args=("--tensor-model-parallel-size", "8"))
    with pytest.raises(UsageError, match="contradicts the plan"):
        torchrun_lines(replace(PLAN, workload=load), "plan.json")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "0x0", "224.0.0.1"])
def test_a_wildcard_is_never_a_host(host: str) -> None:
    hosts = (replace(PLAN.hosts[0], host=host), *PLAN.hosts[1:])
    for may_be_public in (False, True):
        with pytest.raises(PlanFormatError):
            check_hosts(hosts, may_be_public=may_be_public)


@pytest.mark.parametrize("host", ["8.8.8.8", "2001:4860:4860::8888"])
def test_a_public_address_is_a_host_when_asked_for(host: str) -> None:
    hosts = (replace(PLAN.hosts[0], host=host), *PLAN.hosts[1:])
    with pytest.raises(PlanFormatError, match="--public-addresses"):
        check_hosts(hosts)
    check_hosts(hosts, may_be_public=True)
