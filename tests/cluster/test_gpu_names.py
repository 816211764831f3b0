"""Names of GPUs: several hundred public spellings, and what each is taken for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.cluster.gpu_names import (
    candidates,
    find_gpu,
    names_match,
    near_candidates,
    part_of_card,
)
from megatron_hetero.cluster.inventory.discovery import catalogue_name
from megatron_hetero.cluster.makers import library_of_name
from tests.timing import assert_within

TABLE = Path(__file__).parent / "gpu_spellings.txt"


def spellings() -> Iterator[tuple[str, str]]:
    source = ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("["):
            source = line
        elif not line.startswith("#"):
            name, _, wanted = line.partition(" = ")
            yield name, wanted
            if source.startswith("[nvidia-smi"):
                # As Slurm's NVML plug-in and GPU feature discovery write the driver's name.
                yield name.lower().replace(" ", "_"), wanted
                yield name.replace(" ", "-"), wanted


def driver_names() -> Iterator[tuple[str, str]]:
    """The rows of the sections of `nvidia-smi` and `rocm-smi`."""
    source = ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("["):
            source = line
        elif not line.startswith("#") and source.startswith(("[nvidia-smi", "[rocm-smi")):
            name, _, wanted = line.partition(" = ")
            yield name, wanted


def answer(name: str) -> str:
    found = find_gpu(name)
    if found is not None:
        return found.name
    return "?" if candidates(name) or near_candidates(name) else "-"


def wrong_of(rows: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    known = set(gpu_type_names())
    wrong = []
    for name, wanted in rows:
        got = answer(name)
        # A card that the catalogue does not have yet is none of it, or asked for.
        fits = got == wanted or (wanted not in known and wanted != "?" and got in ("-", "?"))
        if not fits:
            wrong.append((name, wanted, got))
    return wrong


def test_every_spelling_is_what_it_means() -> None:
    rows = list(spellings())
    assert len(rows) >= 400
    assert wrong_of(rows) == []


@pytest.mark.parametrize("name", gpu_type_names())
def test_every_gpu_is_known_by_each_of_its_names(name: str) -> None:
    for written in (name, name.lower(), name.replace("-", "_"), name.replace("-", " ")):
        found = find_gpu(written)
        assert found is not None and found.name == name
    assert catalogue_name(name, gpu_type(name).memory_bytes) == name
    assert names_match(name, name)
    assert not part_of_card(name)


@pytest.mark.parametrize("gpu", gpu_type_names())
def test_the_driver_s_name_of_every_gpu_is_in_the_table(gpu: str) -> None:
    """Some names are of two cards, which their memory tells apart."""
    meant = ((wanted, *candidates(name)) for name, wanted in driver_names() if wanted != "-")
    assert any(gpu in names for names in meant), (
        f"gpu_spellings.txt has no name of the driver for {gpu}: change the line that says -, or "
        "add one under [nvidia-smi ...] or [rocm-smi ...]"
    )


def test_no_name_is_of_another_maker() -> None:
    for name, wanted in spellings():
        if wanted in gpu_type_names():
            library = library_of_name(name.replace("_", "-"))
            assert library in (None, gpu_type(wanted).library)


def test_a_letter_more_is_another_card() -> None:
    """A letter behind a model's number makes no other GPU of the catalogue by chance."""
    for name in gpu_type_names():
        for letter in "gxqz":
            words = name.split("-")
            changed = "-".join((words[0] + letter, *words[1:]))
            found = find_gpu(changed)
            assert found is None or changed.upper() in {n.upper() for n in gpu_type_names()}


@pytest.mark.parametrize("name", ["x" * 10_000, "A100-" * 2_000, "-" * 10_000, "\0" * 10_000])
def test_long_names_are_none_at_once(name: str) -> None:
    def is_none() -> None:
        assert answer(name) == "-"
        assert not names_match("A100-40GB", name)

    assert_within(1, is_none)
