"""A process on a machine of unlike cards: the plan's own card, or a refusal, whatever CUDA says.

CUDA is stood in for by its two documented orders: that of the PCI bus, and the fastest card first.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import pytest

from megatron_hetero.errors import EnvironmentMismatchError, UsageError
from megatron_hetero.flags.environment import NODE_VARIABLE
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.ranks import Position
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.checks import bus, machine
from megatron_hetero.runtime.job.checks.machine import check_same_model
from tests.plan.edits import PLAN
from tests.plan.strategies import workload

BUS = ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090",
       "NVIDIA GeForce RTX 3090")  # fmt: skip
TYPES = ("RTX-3090", "RTX-3090", "RTX-4090", "RTX-3090")
FASTEST_FIRST = (2, 0, 1, 3)
BUS_IDS = tuple(f"00000000:{0x20 + i:02x}:00.0" for i in range(4))


class Machine:
    """`cards`: places on the bus by CUDA's numbers; a process sees those in `visible`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, says_bus_ids: bool = True) -> None:
        self._monkeypatch, self._says_bus_ids = monkeypatch, says_bus_ids
        monkeypatch.setattr(backend, "cuda_is_usable", lambda: True)
        monkeypatch.setenv(NODE_VARIABLE, "box")
        monkeypatch.setattr(bus, "machine_bus_ids", lambda: BUS_IDS)

    def start(self, used: tuple[int, ...], order: str | None) -> list[tuple[int, int | None]]:
        """Return, for each process of the machine, the bus place that the plan wants and the one it
        gets.

        The second is None for a process that is refused.
        """
        cards = range(4) if order == "PCI_BUS_ID" else FASTEST_FIRST
        visible = [tuple(cards)[i] for i in used]
        if order is None:
            self._monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        else:
            self._monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
        cuda = machine.torch.cuda
        self._monkeypatch.setattr(cuda, "get_device_name", lambda i: BUS[visible[i]])
        self._monkeypatch.setattr(cuda, "device_count", lambda: len(visible))
        self._monkeypatch.setattr(cuda, "get_device_properties", lambda i: self._card(visible[i]))
        types = tuple(TYPES[i] for i in used)
        host = PLAN.hosts[0].__class__("box", "box", None, used, types)
        plan = SimpleNamespace(hosts=(host,), type_by_device=host.type_by_device)
        got: list[tuple[int, int | None]] = []
        for rank, wanted in enumerate(used):
            self._monkeypatch.setenv("LOCAL_RANK", str(rank))
            position = Position(0, 0, 0, device=f"box:{wanted}")
            try:
                machine.check_binding(plan, rank, position)
            except EnvironmentMismatchError as error:
                self.said = str(error)
                got.append((wanted, None))
            else:
                got.append((wanted, visible[rank]))
        return got

    def _card(self, place: int) -> SimpleNamespace:
        ids = {"pci_domain_id": 0, "pci_bus_id": 0x20 + place, "pci_device_id": 0}
        return SimpleNamespace(name=BUS[place], **(ids if self._says_bus_ids else {}))


SUBSETS = [used for n in (1, 2, 3, 4) for used in permutations(range(4), n)]


@pytest.mark.parametrize("says_bus_ids", [True, False])
def test_in_the_order_of_the_bus_every_card_is_the_plans(
    says_bus_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Machine(monkeypatch, says_bus_ids=says_bus_ids)
    for used in SUBSETS:
        assert box.start(used, "PCI_BUS_ID") == [(i, i) for i in used]


@pytest.mark.parametrize("says_bus_ids", [True, False])
@pytest.mark.parametrize("lists_cards", [True, False])
@pytest.mark.parametrize("order", ["FASTEST_FIRST", None])
def test_another_order_is_never_wrong_in_silence(
    order: str | None, lists_cards: bool, says_bus_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Machine(monkeypatch, says_bus_ids=says_bus_ids)
    if not lists_cards:
        monkeypatch.setattr(bus, "machine_bus_ids", lambda: ())
    num_refused = 0
    for used in SUBSETS:
        for wanted, found in box.start(used, order):
            assert found in (None, wanted), used
            num_refused += found is None
    assert num_refused > 100
    box.start((1, 3), order)  # two cards of one type, whose names are alike
    assert "Set CUDA_DEVICE_ORDER=PCI_BUS_ID" in box.said


def test_a_card_in_its_place_needs_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last card is the last in both orders."""
    assert Machine(monkeypatch).start((3,), None) == [(3, 3)]


def test_bus_ids_are_written_as_the_driver_does() -> None:
    assert bus.normal_bus_id("0000:3B:00.0") == bus.normal_bus_id("00000000:3b:00.0")


def test_flags_may_have_the_size_that_all_replicas_have() -> None:
    """What `flags` writes where the plan gives all replicas another size than the job's."""
    shape = plan_from_layout(parse_layout("tp1:8 @5x2 | tp1:8 @3x2"))
    made_for = workload()
    plan = replace(shape, workload=made_for)

    def with_size(size: int) -> Workload:
        return replace(made_for, training=replace(made_for.training, micro_batch_size=size))

    check_same_model(plan, made_for)
    check_same_model(plan, with_size(2))
    with pytest.raises(UsageError, match="micro_batch_size: plan 1, flags 3"):
        check_same_model(plan, with_size(3))
