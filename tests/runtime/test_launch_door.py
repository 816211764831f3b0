"""`python -m megatron_hetero.launch`: a script of the user's own, unchanged, on a plan."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from megatron_hetero import launch
from megatron_hetero.errors import HeteroError
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.workloads import plan, workload

# The shape of Megatron-LM's pretrain_gpt.py: three functions imported by name, called in turn, and
# a forward step and datasets that ask for Megatron's configuration once more.
SCRIPT = """
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron_hetero.runtime.model import gpt

def forward_step(data_iterator, model):
    core_transformer_config_from_args(get_args())
    return gpt.forward_step(data_iterator, model)

def datasets(num_samples, vp_stage=None):
    core_transformer_config_from_args(get_args())
    return gpt.datasets_provider(num_samples)

def with_a_flag_of_its_own(parser):
    parser.add_argument("--of-the-script", type=int, default=0)
    return parser

if __name__ == "__main__":
    setattr(datasets, "is_distributed", True)
    args = parse_and_validate_args(
        extra_args_provider=with_a_flag_of_its_own,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
    print("its own flag:", args.of_the_script, flush=True)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, store=None,
             get_embedding_ranks=lambda ranks: ranks)
"""
UNEVEN = "tp3(2:1:1):3,tp1:1 @4 | tp1:4 @2"


def losses(log: Path) -> list[str]:
    return re.findall(r"lm loss: (\S+) .*grad norm: (\S+) ", log.read_text())


@pytest.mark.parametrize(("layout", "num_ranks"), [(UNEVEN, 5), ("tp1:2,tp1:2 @6", 2)])
def test_a_script_trains_as_the_entry_does(layout: str, num_ranks: int, tmp_path: Path) -> None:
    """Both on a plan that only our runtime runs and on one that is handed to stock Megatron."""
    jobs = VerifyJobs(shrink(plan(layout), workload()), Options(steps=2), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    argv = [*jobs.training_arguments("adam"), f"--hetero-layout={layout}"]
    argv.append(f"--data-cache-path={tmp_path / 'cache'}")
    script = tmp_path / "my_pretrain.py"
    script.write_text(SCRIPT)

    def by_the_door(rank: int) -> None:
        launch.run_script(script, [*argv, "--of-the-script", "3"])

    def by_the_entry(rank: int) -> None:
        entry.main(argv)

    run_jobs([LocalJob("door", num_ranks, by_the_door, tmp_path / "door")], 120)
    run_jobs([LocalJob("entry", num_ranks, by_the_entry, tmp_path / "entry")], 120)
    last = f"rank-{num_ranks - 1}.log"
    assert "its own flag: 3" in (tmp_path / "door" / last).read_text()
    assert len(losses(tmp_path / "door" / last)) == 2
    assert losses(tmp_path / "door" / last) == losses(tmp_path / "entry" / last)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("    pretrain(config", "    (lambda *a, **b: 0)(config"), "without a call of"),
        (("store=None", "model_provider=print"), "passes model_provider"),
        (("gpt_config_from_args(args))", "entirely_its_own(args))"), "does not build its model"),
    ],
)
def test_a_script_that_the_plan_cannot_follow_is_refused(
    change: tuple[str, str], words: str, tmp_path: Path
) -> None:
    changed = SCRIPT.replace(*change)
    assert changed != SCRIPT
    # Bound before the door is opened, as a module of the script's own would have it.
    extra = "from megatron.training import argument_utils\n"
    original = "argument_utils.gpt_config_from_args.__wrapped__"
    extra += f"entirely_its_own = lambda args: {original}(args)\n"
    (tmp_path / "script.py").write_text(extra + changed)
    argv = [
        *("--num-layers=4", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=16"),
        *("--max-position-embeddings=16", "--micro-batch-size=1", "--global-batch-size=6"),
        *("--train-iters=1", "--lr=1e-3", "--mock-data", "--tokenizer-type=NullTokenizer"),
        *("--vocab-size=64", "--eval-interval=10", "--hetero-layout=tp2:3,tp1:1 @6"),
    ]
    told: list[str] = []

    def train(rank: int) -> None:
        try:
            launch.run_script(tmp_path / "script.py", argv)
        except SystemExit as refusal:
            told.append(str(refusal.code))
            assert isinstance(refusal.__context__, HeteroError)
            (tmp_path / f"told-{rank}").write_text(str(refusal.__context__))
        except HeteroError as refusal:
            (tmp_path / f"told-{rank}").write_text(str(refusal))

    run_jobs([LocalJob("refused", 3, train, tmp_path)], 120)
    assert words in (tmp_path / "told-0").read_text()


def test_a_script_that_is_not_there(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launch", "nowhere.py"])
    assert launch.main() == 2
    assert "nowhere.py: there is no such script" in capsys.readouterr().err
