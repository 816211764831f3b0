"""A user's own SkyPilot task goes into the written one, whole but for what the plan decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from megatron_hetero.errors import ClusterError, UsageError
from megatron_hetero.flags.launchers.registry import LAUNCHERS
from megatron_hetero.flags.launchers.sky_tasks import yaml_value
from tests.flags.launch_jobs import job

GPUS = "A100-80GB:4"  # what the plan's first machine has


def launched(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Any:
    """Return the job, and the written task of the plan's A100 machine as data."""
    (folder / "task.yaml").write_text(text)
    monkeypatch.chdir(folder)
    options = {"infra": [], "spot": False, "open_ports": False, "image": "a/b:1"} | given
    made = LAUNCHERS["skypilot"].read_options(  # type: ignore[misc]
        job(image=options.pop("image")), {"task": ["A100-80GB=task.yaml"], **options}
    )
    files = {f.name: f.text for f in LAUNCHERS["skypilot"].files(made)}
    return made, YAML(typ="safe").load(files["part-0.yaml"]), files["start.sh"]


def test_everything_but_the_plans_own_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "data").mkdir()
    made, task, start = launched(
        tmp_path,
        f"""
name: mine
num_nodes: 7
workdir: ./code
resources: {{accelerators: {GPUS}, infra: gcp/us-central1, use_spot: true, disk_size: 512,
  labels: {{team: x}}, network_tier: best}}
envs: {{MODEL: 8b, ANSWER: "yes", EMPTY: "", TOKEN: null}}
secrets: {{HF_TOKEN: hunter2}}
file_mounts:
  /data: s3://bucket/data
  ~/local: ./data
  /ck/${{MODEL}}: {{name: my-ck, source: data, mode: MOUNT}}
setup: |
  pip install -r requirements.txt
run: python x.py
config: {{docker: {{run_options: ["-v /x:/y"]}}}}
""",
        monkeypatch,
        image="docker:a/b:1",
    )
    assert task["name"] == "megatron-hetero-0" and task["num_nodes"] == 1
    assert task["workdir"] == str(tmp_path / "code")
    assert task["resources"] == {
        "accelerators": GPUS, "infra": "gcp/us-central1", "use_spot": True, "disk_size": 512,
        "labels": {"team": "x"}, "network_tier": "best", "image_id": "docker:a/b:1",
    }  # fmt: skip
    assert task["file_mounts"] == {
        "/data": "s3://bucket/data",
        "~/local": str(tmp_path / "data"),
        "/ck/${MODEL}": {"name": "my-ck", "source": str(tmp_path / "data"), "mode": "MOUNT"},
        "~/megatron-hetero-job": ".",
    }
    assert task["envs"] == {
        "MASTER_ADDR": "not-yet", "MODEL": "8b", "ANSWER": "yes", "EMPTY": "", "TOKEN": None,
    }  # fmt: skip
    assert task["secrets"] == {"HF_TOKEN": None}
    assert "hunter2" not in start and start.count(" --env TOKEN --secret HF_TOKEN") == 2
    assert task["setup"] == "pip install -r requirements.txt\n"
    assert task["config"] == {"docker": {"run_options": ["-v /x:/y"]}}
    assert 'exec bash ~/megatron-hetero-job/train.sh $((0 + SKYPILOT_NODE_RANK))' in task["run"]
    assert [note.partition(": ")[2][:30] for note in made.notes] == [
        "start.sh takes HF_TOKEN, TOKEN",
        "its run is not taken over: tra",
    ]


@pytest.mark.parametrize(
    ("resources", "kept"),
    [
        # The choices of other GPUs go; what is left of one choice is no choice.
        (f"{{any_of: [{{cloud: gcp, accelerators: '{GPUS}'}}, "
         "{cloud: aws, accelerators: 'H100:8', use_spot: true}]}",
         {"cloud": "gcp"}),
        (f"{{any_of: [{{infra: gcp, accelerators: '{GPUS}'}}, "
         "{infra: aws, accelerators: {A100-80GB: 4}, use_spot: true}, {infra: azure, "
         "accelerators: 'A100:4'}]}",
         {"any_of": [{"infra": "gcp"}, {"infra": "aws", "use_spot": True}]}),
        (f"{{accelerators: '{GPUS}', ordered: [{{infra: aws}}, {{infra: gcp}}]}}",
         {"ordered": [{"infra": "aws"}, {"infra": "gcp"}]}),
        (f"{{accelerators: ['{GPUS}', 'H100:8'], cloud: aws, region: us-east-1}}",
         {"cloud": "aws", "region": "us-east-1"}),
        ("{accelerators: {A100-80GB: 4}, ports: 8080}", {"ports": 8080}),
    ],
)  # fmt: skip
def test_choices_of_places_stay_and_those_of_gpus_go(
    resources: str, kept: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"resources: {resources}\n"
    _, task, _ = launched(tmp_path, text, monkeypatch)
    assert task["resources"] == {"accelerators": GPUS, "image_id": "docker:a/b:1", **kept}
    assert task["workdir"] == "."


def test_the_command_line_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"resources: {{accelerators: {GPUS}, cloud: gcp, zone: z, image_id: ami-1, ports: 80}}"
    _, task, _ = launched(
        tmp_path, text, monkeypatch, infra=["aws/us-east-1"], spot=True, open_ports=True
    )
    assert task["resources"] == {
        "accelerators": GPUS, "infra": "aws/us-east-1", "use_spot": True,
        "image_id": "docker:a/b:1", "ports": ["80", "29500", "32768-60999"],
    }  # fmt: skip
    choice = f"resources: {{accelerators: {GPUS}, any_of: [{{infra: gcp}}, {{infra: aws}}]}}"
    with pytest.raises(UsageError, match=r"leaves a choice of places \(any_of\)"):
        launched(tmp_path, choice, monkeypatch, infra=["aws"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"resources: {{accelerators: {GPUS}}}\nworkdir: ./nowhere",
         r"task\.yaml:2: workdir: there is no ./nowhere in .*call launch where you call sky"),
        (f"resources: {{accelerators: {GPUS}}}\nfile_mounts:\n  /d: data",
         r"task\.yaml:3: file_mounts\./d: there is no data"),
        (f"resources: {{accelerators: {GPUS}}}\nfile_mounts:\n  /d: {{source: $WHERE/x}}",
         r"hangs on WHERE, which envs gives no value"),
        (f"resources: {{accelerators: {GPUS}}}\nfile_mounts: [a]", r"file_mounts is no mapping"),
        (f"resources: {{accelerators: {GPUS}}}\nenvs: {{'A B; C': 1}}", "no name of a variable"),
        ("resources: {accelerators: 'A100-80GB:8'}",
         r"its machines have A100-80GB:8, and those of the plan 4 x A100-80GB"),
    ],
)  # fmt: skip
def test_refusals(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((UsageError, ClusterError), match=message):
        launched(tmp_path, text, monkeypatch)


def test_machines_that_the_plan_leaves_idle_are_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"resources: {{accelerators: {GPUS}}}"
    made, _, _ = launched(tmp_path, text, monkeypatch, infra=["L4=gcp"])
    assert made.notes[0].startswith("--infra L4=gcp is not needed: the plan's nodes have A100")
    with pytest.raises(UsageError, match="--infra A100-8OGB=gcp: the plan's nodes have"):
        launched(tmp_path, text, monkeypatch, infra=["A100-8OGB=gcp"])


@pytest.mark.parametrize(
    "value",
    ["yes", "On", "n", "null", "~", "", "1:30", "0x1f", "1e3", "a: b", "a #b", "- a", "x:", "é\n"],
)
def test_texts_that_yaml_would_take_for_something_else_are_quoted(value: str) -> None:
    assert yaml_value(value).startswith('"')
    assert YAML(typ="safe").load(yaml_value(value)) == value
