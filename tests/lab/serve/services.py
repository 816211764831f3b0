"""Services of the command line as processes, for tests and tools."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def started(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of the package; end it as Ctrl-C does."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_hetero", *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def until_it_serves(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a service answers."""
    async with aiohttp.ClientSession() as client:
        for _ in range(600):
            assert process.poll() is None, log.read_text()
            try:
                async with client.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise AssertionError(log.read_text())
