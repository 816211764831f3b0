"""Megatron's straggler detector listens on loopback alone, and is still switched there."""

from __future__ import annotations

import socket
import time

import pytest
from megatron.core.utils import StragglerDetector

from megatron_hetero.runtime.megatron import straggler_port
from tests.runtime.listeners import listeners


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("is_replaced", [False, True])
def test_where_the_detector_listens(is_replaced: bool) -> None:
    """Megatron's own first, to see that the kernel's table would show it."""
    detector = object.__new__(StragglerDetector)
    StragglerDetector.__init__(detector)
    detector.port = free_port()
    if is_replaced:
        straggler_port.apply()
    try:
        detector._controller()
        found = {place for place in listeners() if place[1] == detector.port}
        assert found == {("127.0.0.1" if is_replaced else "0.0.0.0", detector.port)}
        with socket.create_connection(("127.0.0.1", detector.port), timeout=10) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert b"200 OK" in connection.recv(1024)
        deadline = time.monotonic() + 10
        while not detector.toggle and time.monotonic() < deadline:
            time.sleep(0.01)
        assert detector.toggle
    finally:
        straggler_port.REPLACEMENT.revert()
        if detector.sock is not None:
            detector.sock.shutdown(socket.SHUT_RDWR)
            detector.sock.close()
            detector.ctrlr.join(timeout=10)
    assert "_controller" in vars(StragglerDetector)


def test_a_port_that_is_taken_stops_no_job(caplog: pytest.LogCaptureFixture) -> None:
    detector = object.__new__(StragglerDetector)
    StragglerDetector.__init__(detector)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        detector.port = other.getsockname()[1]
        straggler_port.apply()
        try:
            detector._controller()
        finally:
            straggler_port.REPLACEMENT.revert()
    assert detector.sock is None
    assert "cannot be switched" in caplog.text
