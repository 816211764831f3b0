"""Jobs that are planned again when a machine is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.job import LaunchJob
from megatron_hetero.flags.launchers.node_script import node_script
from megatron_hetero.flags.launchers.replanning import OnLoss
from megatron_hetero.flags.launchers.ssh import ssh_files
from megatron_hetero.plan.file import save_plan
from tests.flags.launch_jobs import job, mixed_plan, run_script, written

SAVING = ("--save", "ckpt", "--load", "ckpt", "--save-interval", "100")


def replanned(**changes: object) -> LaunchJob:
    machines = tuple((h.node, h.host) for h in mixed_plan().hosts)
    given = {"replanning": OnLoss((*machines, ("spare", "spare.example")))}
    return job(more_flags=SAVING, **given, **changes)


# Machine b fails after a save; in a second life all is well.
TRAIN = """\
[ ! -e "$FOLDER/again" ] || exit 0
[ "$1" = 1 ] || exec sleep 20
mkdir -p "$FOLDER/ckpt"
touch -d "1 hour" "$FOLDER/ckpt/latest_checkpointed_iteration.txt"
touch "$FOLDER/again"
exit 1
"""
PLANNER = """\
printf '%s ' "$@" >>"$FOLDER/said"; echo >>"$FOLDER/said"
while [ "$1" != -o ]; do shift; done
case "$2" in
*.json) touch "$2" ;;
*) mkdir "$2"; cp "$FOLDER"/train.sh "$2"
   printf 'echo "the new start"\\n' >"$2/start.sh"; touch "$2/plan.json" ;;
esac
"""


def started_on(tmp_path: Path, **programs: str) -> Path:
    """Return the folder of a start whose `ssh` and `sleep` are these programs."""
    folder = written(tmp_path, ssh_files(replanned(name="train")), "")
    (folder / "train.sh").write_text(TRAIN)
    (folder / "plan.json").touch()
    for name, text in {**programs, "megatron-hetero": PLANNER}.items():
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_start_goes_on_without_a_lost_machine(is_lost: bool, tmp_path: Path) -> None:
    """The words for the planner, and the new start in the place of the old one."""
    down = '[ "${*: -2}" != "b.example true" ] || exit 255\n' if is_lost else ""
    folder = started_on(
        tmp_path,
        ssh=down + 'exec bash -c "${@: -1}"',
        sleep='[ "$1" = 5 ] || exec /bin/sleep "$1"',
    )
    done = run_script(folder, "start.sh", FOLDER=str(folder))
    assert done.returncode == 0, done.stderr
    if not is_lost:
        assert "the same plan is started again" in done.stderr
        assert "all nodes ended well" in done.stdout
        return
    assert "lost: b; planning for the others" in done.stderr
    assert done.stdout.endswith("the new start\n")
    plan, launch = (line.split() for line in (folder / "said").read_text().splitlines())
    assert plan[:3] == ["plan", "--near", f"{folder}/plan.json"]
    assert plan[-2:] == ["--without", "b"]
    assert launch[:3] == ["launch", f"{folder}/next.json", "-o"]
    assert launch[launch.index("--hetero-on-loss") + 1] == "replan"
    assert launch[launch.index("--name") + 1] == "train"
    assert tuple(launch[launch.index("--") + 1 :]) == SAVING
    assert list(folder.glob("plan-before-*.json"))
    (old_logs,) = folder.glob("logs-*")
    assert f"the logs of the start that failed: {old_logs}\n" in done.stderr


def test_where_no_machine_answers_the_start_asks_again(tmp_path: Path) -> None:
    """The network from here is gone rather than all machines; later one is really lost."""
    # Nobody answers until somebody waited.
    down = """\
[ "${*: -1}" != true ] || [ -e "$FOLDER/waited" ] || exit 255
[ "${*: -2}" != "b.example true" ] || exit 255
exec bash -c "${@: -1}"
"""
    folder = started_on(
        tmp_path,
        ssh=down,
        sleep='[ "$1" != 30 ] || exec touch "$FOLDER/waited"\nexec /bin/sleep "$1"',
    )
    done = run_script(folder, "start.sh", FOLDER=str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no machine of cluster.yaml answers") == 1
    assert "lost: b; planning for the others" in done.stderr


def test_a_silent_connection_ends_where_the_job_goes_on_without_the_machine() -> None:
    """A plan's only machine has nobody beside it who would say that it is gone."""
    start = ssh_files(replanned())[1].text
    assert 'ssh -tt -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=8 "$' in start


def test_a_job_that_is_planned_again_keeps_to_our_runtime() -> None:
    """Whatever plans come, each loads what the one before saved."""
    text = node_script(replanned()).text
    assert "--hetero-plan" in text and "--hetero-on-loss replan" in text
    replanned().check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"more_flags": ("--save", "ckpt")}, "--save-interval, and --save and --load with one"),
        ({"more_flags": ("--save", "a", "--load", "b", "--save-interval", "9")}, "--load b"),
        ({"replanning": OnLoss((("a", "elsewhere"),))}, "not in it; name the file"),
    ],
)
def test_a_job_that_could_not_go_on_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        replace(replanned(), **changes).check()


def test_only_ssh_watches_over_all_machines(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.json"
    save_plan(mixed_plan(), path)
    words = ["launch", str(path), "--for", "slurm", "-o", str(tmp_path / "job")]
    assert main([*words, "--hetero-on-loss", "replan"]) == 2
    assert "plan again by hand" in capsys.readouterr().err
    assert main([*words, "--cluster", "c.yaml"]) == 2
    assert "go with --hetero-on-loss replan" in capsys.readouterr().err


def test_a_cluster_without_the_plans_gpus_is_refused(tmp_path: Path, capsys) -> None:
    save_plan(mixed_plan(), tmp_path / "plan.json")
    (tmp_path / "c.yaml").write_text(
        "version: 1\nnodes: [{name: a, gpu: RTX-4090, count: 1}]\nlinks:\n"
        "  inside_node: {RTX-4090: {bandwidth: 20 GB/s, latency: 12 us}}\n"
    )
    words = ["launch", str(tmp_path / "plan.json"), "--for", "ssh", "-o", str(tmp_path / "job")]
    words += ["--hetero-on-loss", "replan", "--cluster", str(tmp_path / "c.yaml")]
    assert main([*words, "--", *SAVING]) == 4
    assert "has no GPU" in capsys.readouterr().err
    assert not (tmp_path / "job").exists()
