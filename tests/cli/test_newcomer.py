"""What a newcomer mistypes or leaves out is answered with what was meant."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import cluster_hash, load_cluster
from megatron_hetero.errors import ClusterError, PlanFormatError
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.diff import diff_plans
from megatron_hetero.plan.file import load_plan, plan_to_data
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from megatron_hetero.report.text.refusals import note_lines
from tests.cost.builders import CLUSTER, make_workload, place

ROOT = Path(__file__).resolve().parents[2]
LOST = ROOT / "examples/lost-node"


def flags_of_the_example() -> str:
    """In one line, of fewer layers and a smaller batch, which is planned sooner."""
    text = (LOST / "gpt-6.7b.flags").read_text().replace("\n", " ")
    text = text.replace("--num-layers 32", "--num-layers 8")
    return text.replace("batch-size 48", "batch-size 8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plna", "--cluster", "x"], 'there is no verb "plna" (did you mean "plan"?)'),
        (["--color", "never", "lanch"], 'there is no verb "lanch" (did you mean "launch"'),
        (
            ["plan", "--cluster", "x", "--num-leyers", "4"],
            '--num-leyers 4 (did you mean "--num-lay',
        ),
        (["explain", "p.json", "--what-iff"], '--what-iff (did you mean "--what-if"'),
        (["validate", "p.json", "--num-layers", "4"], "unrecognized arguments: --num-layers 4\n"),
    ],
)
def test_near_names_of_verbs_and_flags(words: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_cluster_in_the_place_of_a_plan(capsys) -> None:
    assert main(["flags", str(LOST / "after.yaml")]) == 4
    error = capsys.readouterr().err
    assert "a plan is a JSON file, not YAML" in error and "megatron-hetero plan --cluster" in error


def test_it_is_said_whether_the_plan_or_the_cluster_changed() -> None:
    cluster = replace(CLUSTER, source="cluster.yaml")
    layout = parse_layout("tp2:3,tp2:1 @4")
    plan = place_in_order(plan_from_layout(layout, make_workload()), cluster)
    plan = replace(plan, inputs={"cluster": cluster_hash(cluster)})
    nodes = (replace(cluster.nodes[0], host="elsewhere"), *cluster.nodes[1:])
    with pytest.raises(PlanFormatError, match=r"cluster.yaml is not what the plan was made for"):
        validate_plan(plan, replace(cluster, nodes=nodes), "plan.json")
    hosts = (replace(plan.hosts[0], host="elsewhere"), *plan.hosts[1:])
    with pytest.raises(PlanFormatError, match=r"plan.json was changed since"):
        validate_plan(replace(plan, hosts=hosts), cluster, "plan.json")
    with pytest.raises(PlanFormatError) as caught:
        validate_plan(replace(plan, hosts=hosts, inputs={}), cluster, "plan.json")
    assert "made for" not in str(caught.value)


def test_all_nodes_without_links_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "version: 1\nnodes:\n  - {name: a, gpu: A100-40GB, count: 2}\n"
        "  - {name: one, gpu: T4, count: 1}\n  - {name: b, gpu: RTX-4090, count: 4}\n"
        "links: {}\n"
    )
    words = (
        'nodes "a", "b" have several GPUs each and no link between them; add '
        "links.inside_node.A100-40GB and links.inside_node.RTX-4090 or"
    )
    with pytest.raises(ClusterError) as caught:
        load_cluster(path)
    assert words in str(caught.value) and ":3: nodes[0]" in str(caught.value)


def test_a_host_file_s_cluster_says_which_links_are_missing(tmp_path: Path, capsys) -> None:
    hosts = tmp_path / "hostfile"
    hosts.write_text("h1 slots=8 type=A800-80GB\n")
    assert main(["convert", "--hostfile", str(hosts)]) == 0
    path = tmp_path / "cluster.yaml"
    path.write_text(capsys.readouterr().out)
    with pytest.raises(ClusterError, match=r"has 8 GPUs and no link between them"):
        load_cluster(path)


def test_init_says_what_plan_needs(tmp_path: Path, capsys) -> None:
    path = tmp_path / "cluster.yaml"
    assert main(["init", "--node", "rtx-0=2xRTX-4090", "-o", str(path)]) == 0
    assert "--model FILE" in " ".join(capsys.readouterr().out.split())


def test_diff_says_what_a_missing_setting_means() -> None:
    plan = place("tp2:3,tp1:1 @4", make_workload())
    first = replace(plan.replicas[0].stages[0], num_launched_forwards=3, optimizer_share=2)
    stages = (first, *plan.replicas[0].stages[1:])
    after = replace(plan, replicas=(replace(plan.replicas[0], stages=stages),))
    shown = {str(difference) for difference in diff_plans(plan, after)}
    assert "replica 0, stage 0: num launched forwards 1F1B's own -> 3" in shown
    assert "replica 0, stage 0: optimizer share 1 -> 2" in shown


def test_flags_of_shell_variables_are_named_when_launch_files_are_written(
    tmp_path: Path, capsys
) -> None:
    script = tmp_path / "gpt.sh"
    flags = flags_of_the_example()
    script.write_text(f"python pretrain_gpt.py {flags} --data-path $DATA --save $1\n")
    plan = tmp_path / "plan.json"
    words = ["plan", "--cluster", str(LOST / "before.yaml"), "--model", str(script)]
    assert main([*words, "--strategy", "symmetric", "-o", str(plan), "--json"]) == 0
    workload = load_plan(plan).workload
    assert workload is not None and plan_to_data(load_plan(plan))
    assert workload.unread_flags == ("--data-path", "--save")
    launch = ["launch", str(plan), "--for", "torchrun", "-o"]
    capsys.readouterr()
    assert main([*launch, str(tmp_path / "one")]) == 0
    error = " ".join(capsys.readouterr().err.split())
    assert "--data-path is left out: $DATA is not set in the script" in error
    assert "the job starts without --data-path, --save" in error
    given = ["--", "--data-path", "x", "--save", "y"]
    assert main([*launch, str(tmp_path / "two"), *given]) == 0
    assert "left out" not in capsys.readouterr().err


def test_convert_takes_what_the_model_lacks_behind_the_dashes(tmp_path: Path, capsys) -> None:
    layout, model = tmp_path / "llama.sh", tmp_path / "gpt.sh"
    layout.write_text(
        'torchrun train.py --hetero_configs "[[4, 2], [2]]" --layer_partitions "[[20, 12], [32]]" '
        "--chunks 24 4 --global_bsz_size 24 4\n"
    )
    flags = (LOST / "gpt-6.7b.flags").read_text().replace("\n", " ")
    flags = flags.replace("--vocab-size 50257", "").replace("batch-size 48", "batch-size 28")
    model.write_text(f"python pretrain_gpt.py {flags}\n")
    words = ["convert", str(layout), "--from", "hexiscale", "--model", str(model)]
    words += ["-o", str(tmp_path / "plan.json")]
    assert main(words) == 4
    assert "-- --vocab-size N" in capsys.readouterr().err
    assert main([*words, "--", "--vocab-size", "50257"]) == 0
    workload = load_plan(tmp_path / "plan.json").workload
    assert workload is not None and workload.model.vocab_size == 50257


def test_what_a_script_takes_from_the_shell_is_named_by_every_verb(tmp_path: Path, capsys) -> None:
    script = tmp_path / "gpt.sh"
    flags = flags_of_the_example()
    script.write_text(
        "RUN=x-$(date +%Y%m%d)\nROOT=/data/runs/$RUN\n"
        'OUT="--save $ROOT/ckpt --load $ROOT/ckpt --save-interval 500 --eval-interval 500"\n'
        f"python pretrain_gpt.py {flags} --seed $SEED $OUT\n"
    )
    plan, cluster = tmp_path / "plan.json", str(LOST / "before.yaml")
    words = ["plan", "--cluster", cluster, "--model", str(script), "--strategy", "symmetric"]
    reason = "RUN (line 1) depends on $(date +%Y%m%d), which is not run"
    assert main([*words, "-o", str(plan), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    shown = "".join(str(line) for line in note_lines(load_plan(plan)))
    note = f"{script}:3: --save, --load are left out: {reason}"
    assert note in notes and note in shown
    assert f"{script}:4: --seed is left out: $SEED is not set in the script" in notes
    assert main(["flags", str(plan)]) == 0
    shown = capsys.readouterr().out
    assert "--save-interval 500" in shown and "--eval-interval 500" in shown
    assert sum(line.startswith("# NOTE: ") and reason in line for line in shown.splitlines()) == 1
    launch = ["launch", str(plan), "--for", "torchrun", "-o", str(tmp_path / "job")]
    assert main(launch) == 0
    assert " ".join(capsys.readouterr().err.split()).count(reason) == 1
    doctor = ["doctor", str(plan), "--cluster", cluster, "--json"]
    assert main(doctor) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    left = [finding for finding in findings if finding["id"] == "flag-left-out"]
    assert [(f["severity"], f["what"].split()[0]) for f in left] == [
        ("error", "--save"), ("error", "--load"), ("warning", "--seed"),
    ]  # fmt: skip
    main([*doctor, "--", "--save", "x", "--load", "x", "--seed", "1"])
    assert "flag-left-out" not in capsys.readouterr().out


@pytest.mark.parametrize("model", ["one-workstation/llama-1.5b.flags", "three-gpus/config.json"])
def test_swapped_files_are_called_so(model: str, capsys) -> None:
    cluster, model = str(LOST / "before.yaml"), str(ROOT / "examples" / model)
    assert main(["plan", "--cluster", model, "--model", cluster]) == 4
    assert f"{model}:1: this is no cluster file" in capsys.readouterr().err
    assert main(["plan", "--memory", "--model", cluster]) == 4
    assert "are the two swapped?" in capsys.readouterr().err
