"""Other systems' configurations: read, written, and back again; what they cannot say is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.convert.flagscale import cluster_text, from_flagscale, to_flagscale
from megatron_hetero.convert.given import read_flags
from megatron_hetero.convert.hexiscale import from_hexiscale, to_hexiscale
from megatron_hetero.convert.list_literal import parse_pipelines
from megatron_hetero.errors import ClusterError, HeteroError, UnsupportedError, UsageError
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import load_plan, save_plan
from megatron_hetero.plan.layout import format_layout, parse_layout
from megatron_hetero.plan.plan import Layout, ReplicaShape, StageShape

# The shape of HexiScale's own example, with two unlike pipelines.
SCRIPT = """
GPUS_PER_NODE=8
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes 1"
torchrun $DISTRIBUTED_ARGS llama_train.py \\
--model_size llama-7b \\
--hetero_configs "[[4, 2], [2]]" \\
--layer_partitions "[[20, 12], [32]]" \\
--chunks 12 4 \\
--global_bsz_size 24 4 \\
--default_dp_type ddp
"""
HEXISCALE = {
    "--hetero_configs": "[[1] * 2] * 2",
    "--layer_partitions": "[[8, 8]] * 2",
    "--chunks": "4",
    "--global_bsz_size": "4",
}
FLAGSCALE = {
    "--hetero-process-meshes": "2 1 1 2 1  4 1 1 2 2",
    "--hetero-pipeline-layer-split": "8 12 12",
    "--micro-batch-size": "1",
    "--global-batch-size": "16",
}


def words(flags: dict[str, str], **changes: str | None) -> list[str]:
    merged = {**flags, **{f"--{k}": v for k, v in changes.items()}}
    found: list[str] = []
    for name, value in merged.items():
        if value is not None:
            lists = name in ("--hetero_configs", "--layer_partitions", "--pp_layouts")
            found += [name, *([value] if lists else value.split())]
    return found


def test_flagscale_gets_the_micro_batch_size_that_the_plan_chose() -> None:
    """The job's own flags may say another one, and the plan was made with this one."""
    assert to_flagscale(parse_layout("tp1:3,tp1:2 @4x2")).endswith(" --micro-batch-size 2")
    assert "micro-batch-size" not in to_flagscale(parse_layout("tp1:3,tp1:2 @4"))


def test_hexiscales_script(tmp_path: Path, capsys) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    assert main(["convert", str(script), "--from", "hexiscale"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "tp4:20,tp2:12 @12x2 | tp2:32 @4x1\n"
    assert "--default_dp_type is not converted" in captured.err


def test_one_number_stands_for_all_pipelines() -> None:
    made = from_hexiscale(read_flags(None, words(HEXISCALE)))
    assert made.layout == "tp1:8,tp1:8 @4x1 | tp1:8,tp1:8 @4x1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hetero_configs": "[[1, 1]]"}, "pipelines of"),
        ({"layer_partitions": "[[8, 8], [8, 9]]"}, "all hold one model"),
        ({"chunks": "3"}, "no multiple of --chunks"),
        ({"chunks": "1 2 3"}, "3 numbers for 2 pipelines"),
        ({"global_bsz_size": None}, "--global_bsz_size is missing"),
        ({"hetero_configs": "__import__('os')"}, "neither a list nor a whole number"),
        ({"hetero_configs": "[[1] * 10**9]"}, "neither a list nor"),
        ({"hetero_configs": "[[1] * 1000000]"}, "more than 100000 elements"),
        ({"hetero_configs": "[" * 5000}, "not a list"),
        ({"pp_layouts": "[[[1], [0]], [[2], [3]]]"}, "an order of its own"),
    ],
)
def test_what_hexiscale_gets_wrong_is_refused(changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(HeteroError, match=message):
        from_hexiscale(read_flags(None, words(HEXISCALE, **changes)))


def test_ranks_in_their_natural_order_are_no_reason_to_refuse() -> None:
    given_words = words(HEXISCALE, pp_layouts="[[[0], [1]], [[2], [3]]]")
    assert "@4x1" in from_hexiscale(read_flags(None, given_words)).layout


def test_flagscales_meshes_are_stages_of_equal_replicas() -> None:
    made = from_flagscale(read_flags(None, words(FLAGSCALE)))
    assert made.layout == " | ".join(["tp2:8,tp4:12,tp4:12 @8"] * 2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hetero-process-meshes": "2 1 1 2"}, UsageError, "five for each mesh"),
        ({"hetero-process-meshes": "2 2 1 2 3"}, UnsupportedError, "context parallelism"),
        ({"hetero-process-meshes": "2 1 2 2 3"}, UnsupportedError, "expert parallelism"),
        ({"hetero-process-meshes": "2 1 1 2 1 4 1 1 1 2"}, UnsupportedError, "differ"),
        ({"hetero-pipeline-layer-split": "8 24"}, UsageError, "2 numbers for 3 stages"),
        ({"global-batch-size": "15"}, UsageError, "no multiple"),
        ({"global-batch-size": "x"}, UsageError, "whole numbers above 0"),
    ],
)
def test_what_flagscale_gets_wrong_is_refused(
    changes: dict[str, str], error: type[HeteroError], message: str
) -> None:
    with pytest.raises(error, match=message):
        from_flagscale(read_flags(None, words(FLAGSCALE, **changes)))


def test_flagscale_without_a_split_divides_evenly() -> None:
    flags = words(FLAGSCALE, **{"hetero-pipeline-layer-split": None, "num-layers": "24"})
    assert "tp2:8,tp4:8,tp4:8" in from_flagscale(read_flags(None, flags)).layout


STAGES = st.lists(
    st.builds(StageShape, st.integers(1, 8), st.integers(1, 9)), min_size=1, max_size=4
)
COUNTS = st.integers(1, 9)


@given(stages=STAGES, count=COUNTS, replicas=st.integers(1, 4), size=st.integers(1, 4))
def test_flagscale_and_back(stages: list[StageShape], count: int, replicas: int, size: int) -> None:
    layout = Layout((ReplicaShape(tuple(stages), count),) * replicas)
    batch = count * replicas * size
    flags = f"{to_flagscale(layout)} --micro-batch-size {size} --global-batch-size {batch}"
    assert from_flagscale(read_flags(None, flags.split())).layout == format_layout(layout)


@given(data=st.data())
def test_hexiscale_and_back(data: st.DataObject) -> None:
    total = 12
    replicas = []
    for _ in range(data.draw(st.integers(1, 3))):
        cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=3)))
        layers = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        stages = tuple(StageShape(data.draw(st.integers(1, 8)), n) for n in layers)
        replicas.append(ReplicaShape(stages, data.draw(COUNTS), data.draw(st.integers(1, 3))))
    layout = Layout(tuple(replicas))
    flags = shlex.split(to_hexiscale(layout, None))
    assert from_hexiscale(read_flags(None, flags)).layout == format_layout(layout)


@pytest.mark.parametrize("system", ["hexiscale", "flagscale"])
def test_uneven_shares_exist_nowhere_else(system: str) -> None:
    layout = parse_layout("tp2(3:1):4 @2x1")
    with pytest.raises(UnsupportedError, match=r"uneven shares|evenly"):
        to_hexiscale(layout, 1) if system == "hexiscale" else to_flagscale(layout)


@pytest.mark.parametrize("system", ["hexiscale", "flagscale"])
def test_context_parallelism_is_not_converted(system: str) -> None:
    layout = parse_layout("tp2cp2:4 @2x1")
    with pytest.raises(UnsupportedError, match="context parallelism"):
        to_hexiscale(layout, 1) if system == "hexiscale" else to_flagscale(layout)


@pytest.mark.parametrize("system", ["hexiscale", "flagscale"])
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("tp1:4z2 @2x1 | tp1:4z2 @2x1", "sharded layers"),
        ("tp2ep2:4 @2x1", "experts dealt out"),
        ("tp1ep2:4 @2x1 | tp1ep2:4 @2x1", "experts dealt out"),
    ],
)
def test_sharded_layers_and_dealt_experts_are_not_lost_in_silence(
    system: str, text: str, part: str
) -> None:
    layout = parse_layout(text)
    with pytest.raises(UnsupportedError, match=part):
        to_hexiscale(layout, 1) if system == "hexiscale" else to_flagscale(layout)


def test_unlike_replicas_are_not_flagscales() -> None:
    with pytest.raises(UnsupportedError, match="differ"):
        to_flagscale(parse_layout("tp2:4 @2 | tp1:4 @2"))


def test_repeated_and_added_lists() -> None:
    assert parse_pipelines("[[1] * 2 + [4]] * 2 + [[8]]", "x") == [[1, 1, 4], [1, 1, 4], [8]]


def test_a_host_file_becomes_the_nodes_of_a_cluster(tmp_path: Path, capsys) -> None:
    path = tmp_path / "hostfile"
    path.write_text("# two kinds\n10.0.0.1 slots=8 type=A800-80GB\n10.0.0.2 slots=4 type=rtx4090\n")
    text = cluster_text(path)
    assert '{name: node-0, gpu: A800-80GB, count: 8, host: "10.0.0.1"}' in text
    assert '{name: node-1, gpu: RTX-4090, count: 4, host: "10.0.0.2"}' in text
    assert main(["convert", "--hostfile", str(path)]) == 0
    assert capsys.readouterr().out == text
    path.write_text("10.0.0.1 slots=8\n")
    with pytest.raises(HeteroError, match=r"hostfile:1: .*HOST slots=NUMBER type=GPU"):
        cluster_text(path)
    path.write_text("10.0.0.1 slots=8 type=BI150\n")
    with pytest.raises(ClusterError):
        cluster_text(path)


def test_a_host_on_several_lines_is_one_machine_with_unlike_cards(tmp_path: Path) -> None:
    path, written = tmp_path / "hostfile", tmp_path / "cluster.yaml"
    path.write_text(
        "desk slots=1 type=rtx4090\nother slots=4 type=A10\ndesk slots=2 type=rtx3090\n"
    )
    text = cluster_text(path)
    line = "gpus: [{type: RTX-4090, count: 1}, {type: RTX-3090, count: 2}]"
    assert f'{{name: node-0, {line}, host: "desk"}}' in text
    assert '{name: node-1, gpu: A10, count: 4, host: "other"}' in text
    written.write_text(text)
    with pytest.raises(ClusterError, match="no link between"):
        load_cluster(written)
    # What the text says to put in is what loads.
    head, _, links = text.partition("links: {}\n")
    filled = "\n".join(line.removeprefix("# ") for line in links.splitlines()[1:])
    types = "\n".join(
        f"    {gpu}: {{bandwidth: 20 GB/s, latency: 12 us}}" for gpu in ("RTX-3090", "A10")
    )
    filled = filled.replace("    GPU-TYPE: {bandwidth: 20 GB/s, latency: 12 us}", types)
    filled = filled.replace("[GPU-TYPE, GPU-TYPE]", "[RTX-4090, RTX-3090]")
    written.write_text(head + filled + "\n")
    cluster = load_cluster(written)
    assert [d.name for d in cluster.devices][:3] == ["node-0:0", "node-0:1", "node-0:2"]
    assert cluster.machines.keys() == {"node-0", "node-1"}


def test_the_verb_writes_a_plan_and_reads_it_back(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.json"
    argv = ["convert", "--from", "hexiscale", "-o", str(path), "--json", "--", *words(HEXISCALE)]
    assert main(argv) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert main(["convert", str(path), "--to", "hexiscale"]) == 0
    written = capsys.readouterr().out
    assert "--hetero_configs '[[1, 1], [1, 1]]'" in written
    assert "--chunks 4 4 --global_bsz_size 4 4" in written
    assert layout.startswith("tp1:8")
    assert main(["convert", str(path)]) == 2


def test_a_plan_of_a_flagscale_script_keeps_megatrons_flags_alone(tmp_path: Path, capsys) -> None:
    """The script is the model too; its own flags are none of Megatron's."""
    script = tmp_path / "train.sh"
    model = "--num-layers 32 --hidden-size 64 --num-attention-heads 8 --seq-length 16"
    model += " --max-position-embeddings 16 --vocab-size 64 --enable-hetero"
    script.write_text(f"torchrun pretrain_gpt.py {model} {' '.join(words(FLAGSCALE))}\n")
    path = tmp_path / "plan.json"
    argv = ["convert", str(script), "--from", "flagscale", "-o", str(path), "--model", str(script)]
    assert main(argv) == 0
    assert main(["flags", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "--hetero-layout" in shown and "--enable-hetero" not in shown


@pytest.mark.parametrize(
    "more",
    [
        ("script.sh", "--from", "flagscale"),
        ("--from", "hexiscale"),
        ("--to", "flagscale"),
        ("--model", "m.sh"),
        ("-o", "plan.json"),
        ("--json",),
        ("--", "--num-layers=2"),
    ],
)
def test_a_host_file_alone_ignores_nothing_in_silence(
    tmp_path: Path, capsys, more: tuple[str, ...]
) -> None:
    path = tmp_path / "hostfile"
    path.write_text("a slots=8 type=A800\n")
    assert main(["convert", "--hostfile", str(path), *more]) == 2
    assert "--hostfile without --folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--model", "m.sh"), "--model"),
        (("-o", "other.json"), "-o"),
        (("--folder", "job"), "--folder"),
        (("--hostfile", "hosts", "--folder", "job"), "--hostfile and no --folder"),
        (("--", "--num-layers=2"), "Megatron's flags"),
    ],
)
def test_a_plan_to_another_system_ignores_nothing_in_silence(
    tmp_path: Path, capsys, more: tuple[str, ...], named: str
) -> None:
    path = tmp_path / "plan.json"
    save_plan(plan_from_layout(parse_layout("tp2:2,tp1:2 @4"), None), path)
    assert main(["convert", str(path), "--to", "hexiscale", *more]) == 2
    assert f"reads no {named}; leave that out" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_with_parallel_in_it_is_no_flag_of_a_layout(tmp_path: Path) -> None:
    script, path = tmp_path / "train.sh", tmp_path / "plan.json"
    model = "--num-layers 32 --hidden-size 8 --num-attention-heads 4 --seq-length 16"
    model += " --max-position-embeddings 16 --vocab-size 64"
    script.write_text(f"torchrun pretrain_gpt.py {model}\n")
    argv = ["convert", "--from", "flagscale", "-o", str(path), "--model", str(script), "--"]
    tokenizer = "--tokenizer-model=/data/parallel/x"
    assert main([*argv, *words(FLAGSCALE), tokenizer, "--context-parallel-size=1"]) == 0
    workload = load_plan(path).workload
    assert workload is not None and "/data/parallel/x" in " ".join(workload.megatron_args)
    assert not any("context-parallel" in word for word in workload.megatron_args)
