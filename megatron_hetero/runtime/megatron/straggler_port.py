"""`core.utils.StragglerDetector._controller`: the switch of `--log-straggler` on loopback alone.

Rank 0 of Megatron's detector listens on `--straggler-ctrlr-port` of every interface, and whoever
connects switches the detector on or off.  Nothing passes an address to it.  Here it listens on
127.0.0.1: to reach it from elsewhere takes a login on the machine (`ssh -L`).
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.core.utils",
    name="StragglerDetector._controller",
    reason="its switch would listen on all interfaces",
    known={"e9fda1ecf64d2cb0": TESTED},
    is_stock=True,
)
LOOPBACK = "127.0.0.1"


def _controller(detector: Any) -> None:
    # Rank 0 switches the detectors of all ranks.
    if detector.rank != 0:
        return
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # A job that starts anew gets the port at once.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, detector.port))
        listener.listen()
    except OSError as error:
        listener.close()
        # As in Megatron: the job goes on without a switch.
        logging.getLogger(__name__).warning(
            "--straggler-ctrlr-port %s: %s; the detector cannot be switched",
            detector.port,
            error.strerror,
        )
        return
    # Megatron's own handler answers on this socket.
    detector.sock = listener
    detector.ctrlr = threading.Thread(target=detector._handler, name="straggler", daemon=True)
    detector.ctrlr.start()


def apply() -> None:
    """Replace the symbol in this process."""
    REPLACEMENT.apply(_controller)
