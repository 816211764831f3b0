"""The Python interface: its names and parameters stay, and it does what the verbs do."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from megatron_hetero import api
from megatron_hetero.cli.main import main
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.errors import FileFormatError, PlanFormatError
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.planner import plan_and_explain, plan_cluster
from megatron_hetero.planner.request import PLUGIN_GAIN
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.cost.builders import FAST, FREE, make_cluster
from tests.cost.work.test_profile import point, write
from tests.runtime.workloads import plan as plan_of
from tests.runtime.workloads import workload

WORDS = ("--num-layers", "4")
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "a100-rtx4090"

FROZEN = {
    "apply": "(plan: 'Plan', parse_and_validate_args: 'Callable[..., Any]', "
    "gpt_config_from_args: 'Callable[..., Any]', pretrain: 'Callable[..., Any]') -> "
    "'tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]'",
    "load_cluster": "(path: 'Path | str') -> 'Cluster'",
    "load_plan": "(path: 'Path | str') -> 'Plan'",
    "plan": "(cluster: 'Cluster', model: 'Path | str', megatron_args: 'Sequence[str]' = (), *, "
    "profile: 'Path | str | None' = None) -> 'Plan'",
    "save_plan": "(plan: 'Plan', path: 'Path | str') -> 'None'",
    "simulate": "(plan: 'Plan', cluster: 'Cluster', *, profile: 'Path | str | None' = None) -> "
    "'StepSimulation'",
}


def test_the_names_and_their_parameters_stay() -> None:
    found = {
        name: str(inspect.signature(getattr(api, name)))
        for name in api.__all__
        if inspect.isfunction(getattr(api, name))
    }
    assert found == FROZEN
    assert sorted(set(api.__all__) - set(found)) == [
        *("Cluster", "HeteroError", "Plan", "StepSimulation")
    ]
    assert all(getattr(api, name).__doc__ for name in api.__all__)


def test_planning_through_it_loads_no_torch() -> None:
    code = "import sys, megatron_hetero.api; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_a_layout_prints_as_its_line() -> None:
    line = "tp4(3:2:2:1):20,tp2cp2:12 @12 | tp1:32 @4x2"
    assert str(parse_layout(line)) == line


def test_it_plans_and_simulates_as_the_verbs_do(tmp_path: Path, capsys) -> None:
    cluster, script = EXAMPLE / "cluster.yaml", EXAMPLE / "gpt-7b.sh"
    best = api.plan(api.load_cluster(cluster), script)
    path = tmp_path / "plan.json"
    argv = ["plan", "--cluster", str(cluster), "--model", str(script), "-o", str(path)]
    assert main(argv) == 0
    assert api.load_plan(path) == best
    capsys.readouterr()
    assert main(["simulate", str(path), "--cluster", str(cluster), "--json"]) == 0
    simulation = api.simulate(best, api.load_cluster(cluster))
    shown = json.loads(capsys.readouterr().out)
    assert simulation.step_time_s == pytest.approx(shown["step_time_s"], rel=1e-9)


def test_a_plan_with_the_plug_in_gives_way_as_it_does_for_the_verb(tmp_path: Path) -> None:
    """Tiny layers on equal GPUs: stock Megatron's best is as fast as what the search finds."""
    cluster = make_cluster(("a", FAST, 2), ("b", FAST, 1), between=Link(2e9, 1e-5), limits=FREE)
    flags = tmp_path / "job.flags"
    flags.write_text(
        "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --bf16 "
        "--max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1000"
    )
    job = load_workload(flags, ())
    shown, _ = plan_and_explain(cluster, job, plugin_gain=PLUGIN_GAIN)
    assert plan_cluster(cluster, job) != shown
    assert api.plan(cluster, flags) == shown
    # More effort never gives a slower plan.
    longer, _ = plan_and_explain(cluster, job, strategy="thorough", plugin_gain=PLUGIN_GAIN)
    assert longer.estimates is not None and shown.estimates is not None
    assert longer.estimates.step_time_s <= shown.estimates.step_time_s


def test_paths_and_lines_in_the_wrong_place_are_refused(tmp_path: Path) -> None:
    cluster, script = api.load_cluster(EXAMPLE / "cluster.yaml"), EXAMPLE / "gpt-7b.sh"
    best, path = plan_of("tp2:3,tp1:1 @6"), tmp_path / "plan.json"
    for call in (
        lambda: api.plan("cluster.yaml", "job.sh"),  # type: ignore[arg-type]
        lambda: api.plan(cluster, "job.sh", "--num-layers 4"),
        lambda: api.plan(cluster, "job.sh", ["--num-layers", 4]),  # type: ignore[list-item]
        # What is empty after one look, and what loses words or their order.
        lambda: api.plan(cluster, script, (w for w in WORDS)),  # type: ignore[arg-type]
        lambda: api.plan(cluster, script, {WORDS[0]: WORDS[1]}),  # type: ignore[arg-type]
        lambda: api.plan(cluster, script, set(WORDS)),  # type: ignore[arg-type]
        lambda: api.plan(cluster, script, None),  # type: ignore[arg-type]
        lambda: api.plan(cluster, 3),  # type: ignore[arg-type]
        lambda: api.plan(cluster, script, profile=""),
        lambda: api.simulate("plan.json", cluster),  # type: ignore[arg-type]
        lambda: api.simulate(best, cluster, profile={}),  # type: ignore[arg-type]
        lambda: api.load_cluster(b"cluster.yaml"),  # type: ignore[arg-type]
        lambda: api.load_cluster("cluster\0.yaml"),
        lambda: api.load_plan(None),  # type: ignore[arg-type]
        lambda: api.save_plan(None, path),  # type: ignore[arg-type]
        lambda: api.save_plan(str(path), best),  # type: ignore[arg-type]
        lambda: api.save_plan(best, 3),  # type: ignore[arg-type]
    ):
        with pytest.raises(api.HeteroError) as caught:
            call()
        assert caught.value.exit_code == 2
    assert not path.exists()


def test_a_profile_of_one_size_holds_the_plan_as_for_the_verb(tmp_path: Path) -> None:
    """The verb compares no size that nobody measured, and says so."""
    cluster, script = make_cluster(("a", FAST, 2), limits=Limits()), _script(tmp_path)
    measured = [
        point(piece=piece, forward_s=1e-3, backward_s=2e-3)
        for piece in ("embedding", "decoder_layer", "head")
    ]
    profile = write(tmp_path / "profile.json", *measured)
    # Layers that take over ten times the prediction are named too.
    with (
        pytest.warns(UserWarning, match="Only micro-batch size 1 was compared"),
        pytest.warns(UserWarning, match="over 10 times off"),
    ):
        held = api.plan(cluster, script, profile=profile)
    # Without the rule it takes 8, which nobody measured.
    assert {r.micro_batch_size for r in held.replicas} == {None}


def _script(folder: Path, more: str = "") -> Path:
    script = folder / "job.sh"
    script.write_text(
        "python pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 "
        "--seq-length 256 --max-position-embeddings 256 --vocab-size 1000 --bf16 "
        f"--calculate-per-token-loss --micro-batch-size 1 --global-batch-size 16 {more}\n"
    )
    return script


def test_it_warns_of_what_the_verb_does_not_end_well_with(tmp_path: Path) -> None:
    cluster = make_cluster(("a", FAST, 2), limits=FREE)
    with pytest.warns(UserWarning, match=r"job\.sh:1: \$EXTRA is not set") as caught:
        api.plan(cluster, _script(tmp_path, "$EXTRA"))
    assert caught[0].filename == __file__
    unlike = api.load_cluster(EXAMPLE / "cluster.yaml")
    with pytest.warns(UserWarning, match="REFUSED at start-up on this plan: --gpu-sniff-test"):
        api.plan(unlike, EXAMPLE / "gpt-7b.sh", ["--gpu-sniff-test-interval", "3"])


def test_it_says_nothing_of_a_job_that_starts(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        api.plan(make_cluster(("a", FAST, 2), limits=FREE), _script(tmp_path))


def test_a_plan_that_a_program_breaks_is_refused(tmp_path: Path) -> None:
    """One layer is on two stages, which a file of the plan would not be read with."""
    cluster = api.load_cluster(EXAMPLE / "cluster.yaml")
    whole = plan_of("tp2:3,tp1:1 @6")
    (replica,) = whole.replicas
    first = replica.stages[0]
    wider = replace(first, shape=replace(first.shape, num_layers=4))
    broken = replace(whole, replicas=(replace(replica, stages=(wider, replica.stages[1])),))
    for call in (
        lambda: api.simulate(broken, cluster),
        lambda: api.save_plan(broken, tmp_path / "plan.json"),
        lambda: api.apply(broken, print, print, print),
    ):
        with pytest.raises(PlanFormatError, match="stage 1 begins at layer 3, but layer 4 is due"):
            call()
    assert not any(tmp_path.iterdir())


def test_a_plan_that_was_counted_with_numpy_is_saved(tmp_path: Path) -> None:
    whole = plan_of("tp2:3,tp1:1 @6")
    (replica,) = whole.replicas
    counted = replace(replica, num_micro_batches=numpy.int64(6))
    api.save_plan(replace(whole, replicas=(counted,)), tmp_path / "plan.json")
    assert api.load_plan(tmp_path / "plan.json") == whole


def test_its_errors_are_one_tree(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(api.HeteroError) as caught:
        api.load_plan(tmp_path / "plan.json")
    assert isinstance(caught.value, FileFormatError)


def test_a_program_applies_a_plan_of_its_own_making(tmp_path: Path) -> None:
    """The same losses as from the command line with the same layout."""
    asked = plan_of("tp2:3,tp1:1 @6")
    jobs = VerifyJobs(shrink(asked, workload()), Options(steps=1), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    argv = [*jobs.training_arguments("sgd"), f"--data-cache-path={tmp_path / 'cache'}"]

    def by_program(rank: int) -> None:
        from megatron.core.enums import ModelType
        from megatron.training import argument_utils, arguments, pretrain

        from megatron_hetero.runtime.model import gpt

        sys.argv = ["program", *argv]
        parse, configure, train = api.apply(
            asked,
            arguments.parse_and_validate_args,
            argument_utils.gpt_config_from_args,
            pretrain,
        )
        args = parse(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
        config = argument_utils.pretrain_cfg_container_from_args(args, configure(args))
        train(config, gpt.datasets_provider, ModelType.encoder_or_decoder, gpt.forward_step)

    def by_entry(rank: int) -> None:
        from megatron_hetero.runtime.job import entry

        entry.main([*argv, "--hetero-layout=tp2:3,tp1:1 @6"])

    logs = []
    for name, function in (("program", by_program), ("entry", by_entry)):
        run_jobs([LocalJob(name, 3, function, tmp_path / name)], 120)
        text = (tmp_path / name / "rank-2.log").read_text()
        logs.append(text[text.index("lm loss") :].split("|")[0])
    assert logs[0] == logs[1]


def test_plans_and_clusters_are_found_in_tables() -> None:
    """Equal ones are one entry, whatever their mappings hold."""
    plan, cluster = plan_of("tp1:3,tp1:1 @2"), make_cluster(("a", FAST, 2))
    again = replace(plan, inputs=dict(plan.inputs))
    priced = replace(cluster, prices_per_gb={("a", "b"): 1.0})
    assert len({plan, again, replace(plan, schedule="zero-bubble")}) == 2
    assert len({cluster, replace(cluster), priced}) == 2
