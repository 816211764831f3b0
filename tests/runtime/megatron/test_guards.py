"""Guarded symbols: known in the installed Megatron, asked before the ranks meet, compared by
`tools/canary.py` with sources that nobody imports."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import megatron.core
import pytest
from megatron.core import parallel_state

from megatron_hetero.errors import MegatronVersionError
from megatron_hetero.runtime.job import asymmetric, stock
from megatron_hetero.runtime.job.world import World
from megatron_hetero.runtime.megatron import guards
from megatron_hetero.runtime.megatron import parallel_state as filled
from megatron_hetero.runtime.megatron.guarded import Guarded
from tests.runtime.workloads import plan

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import canary  # noqa: E402
from canary import Sources, changes  # noqa: E402

INSTALLED = Path(megatron.core.__file__).parents[2]
SYMBOLS = guards.guarded()


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda s: f"{s.module}.{s.name}")
def test_the_installed_symbol_is_known_and_read_alike_without_import(symbol: Guarded) -> None:
    symbol.check()
    assert Sources(INSTALLED).fingerprint(symbol) == symbol.found()
    with pytest.raises(MegatronVersionError, match=symbol.found()):
        replace(symbol, known={"0" * 16: "nowhere"}).check()


def test_every_file_that_replaces_is_in_the_list() -> None:
    folder = Path(guards.__file__).parent
    declared = [path.read_text().count(" = Replacement(") for path in folder.rglob("*.py")]
    assert len(guards.replaced()) == sum(declared) >= 9


def test_all_globals_that_are_filled_stand_in_the_guarded_names() -> None:
    names = [
        *filled._PIPELINE,
        *filled._TENSOR,
        *filled._STAGE,
        *filled._WORLD,
        *filled._ALONE,
    ]
    (symbol,) = (s for s in SYMBOLS if s.module == parallel_state.__name__ and not s.name)
    symbol.check()
    assert all(hasattr(parallel_state, name) for name in names)


@pytest.mark.parametrize("is_stock", [False, True])
def test_an_unknown_megatron_is_refused_before_any_process_group(
    is_stock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thing that both kinds of jobs do: Megatron's parser is not even asked."""
    (first, *_) = (s for s in guards.OBSERVED if s.is_stock)
    unknown = replace(first, known={"0" * 16: "nowhere"})
    monkeypatch.setattr(guards, "OBSERVED", (unknown,))
    monkeypatch.setattr(guards, "_checked", set())
    world = World(0, 3)
    job: asymmetric.AsymmetricJob | stock.StockJob
    if is_stock:
        job = stock.StockJob((), world)
    else:
        asked = plan("tp2:2,tp1:2 @4")
        from megatron_hetero.runtime.job.arguments import split_arguments

        job = asymmetric.AsymmetricJob(asked, split_arguments(["--micro-batch-size=2"]), world)

    def parser(**given: object) -> None:
        raise AssertionError("Megatron was asked")

    with pytest.raises(MegatronVersionError, match="Install a tested release"):
        job.parse(parser)


def test_the_canary_clones_the_newest_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    repository = tmp_path / "repository"
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q", "-b", "main"], [*who, "commit", "-q", "--allow-empty", "-m", "a"]):
        repository.mkdir(exist_ok=True)
        subprocess.run(["git", *words], cwd=repository, check=True)
    monkeypatch.setattr(sys, "argv", ["canary.py", "--main", str(repository)])
    assert canary.main() == 1
    shown = capsys.readouterr().out
    assert f"{len(SYMBOLS)} guarded symbols, {len(SYMBOLS)} not as they are known" in shown


def test_the_canary_names_what_a_newer_megatron_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of the installed sources with three changes."""

    def others(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if not (n.endswith(".py") or (Path(folder) / n).is_dir())]

    shutil.copytree(INSTALLED / "megatron", tmp_path / "megatron", ignore=others)
    assert changes(tmp_path, SYMBOLS) == []
    path = tmp_path / "megatron/core/pipeline_parallel/schedules.py"
    path.write_text(path.read_text().replace("def backward_step(", "def backward_step(new, "))
    path = tmp_path / "megatron/core/parallel_state.py"
    path.write_text(path.read_text() + "\n_A_NEW_GROUP = None\n")
    (tmp_path / "megatron/core/transformer/moe/moe_logging.py").unlink()
    lines = changes(tmp_path, SYMBOLS)
    assert [line.split()[0] for line in lines] == [
        "megatron.core.parallel_state.(names",
        "megatron.core.pipeline_parallel.schedules.backward_step",
        "megatron.core.transformer.moe.moe_logging.MoEMetricsTracker",
        "megatron.core.transformer.moe.moe_logging.set_moe_metrics_tracker",
    ]
    monkeypatch.setattr(sys, "argv", ["canary.py", str(tmp_path)])
    assert canary.main() == 1
    assert "4 not as they are known" in capsys.readouterr().out
