"""Nodes with a network card of a given rate, on one Linux machine: a network namespace for each.

Processes of one node talk over its loopback interface; what goes to another node passes a queue
that lets so many bits a second through and, if asked, holds each packet for a while.  Needs root
and the commands `ip` and `tc` (iproute2); nothing outside of the namespaces is touched but a
bridge, and all of it is removed at the end.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SUBNET = "10.203.0"


@contextmanager
def shaped_links(
    num_nodes: int, mbit_per_s: float | None, delay_ms: float = 0.0
) -> Iterator[Callable[[int], None]]:
    """Yields `enter(node)`, which a forked process calls before it opens a connection.

    Args:
        mbit_per_s: of each node's card, in either direction on its own; None leaves the machine's
            own loopback, and `enter` does nothing.
        delay_ms: added to every packet that leaves a node.
    """
    if mbit_per_s is None:
        yield lambda node: None
        return
    tag = f"mh{os.getpid() % 10_000}"
    names = [f"{tag}n{node}" for node in range(num_nodes)]
    made: list[list[str]] = []
    try:
        _ip("link", "add", tag, "type", "bridge")
        made.append(["link", "del", tag])
        _ip("link", "set", tag, "up")
        for node, name in enumerate(names):
            _ip("netns", "add", name)
            made.append(["netns", "del", name])
            _ip(
                "link",
                "add",
                f"{tag}v{node}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            # Deleted by name: with its namespace alone it would linger for a while.
            made.append(["link", "del", f"{tag}v{node}"])
            _ip("link", "set", f"{tag}v{node}", "master", tag)
            _ip("link", "set", f"{tag}v{node}", "up")
            _ip("-n", name, "addr", "add", f"{_SUBNET}.{node + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            queue = ["netem", "delay", f"{delay_ms}ms", "limit", "100000"]
            if not delay_ms:
                queue = ["tbf", "burst", "256kb", "latency", "200ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *queue,
                 "rate", f"{mbit_per_s}mbit")  # fmt: skip
        yield lambda node: _enter(names[node])
    finally:
        for command in reversed(made):
            _ip(*command)


def _enter(name: str) -> None:
    with open(f"/run/netns/{name}") as namespace:
        os.setns(namespace.fileno(), os.CLONE_NEWNET)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
