"""`megatron-hetero route`: requests to the replicas of a serving plan, by its weights."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from megatron_hetero.cli.output import Output
from megatron_hetero.errors import EnvironmentMismatchError, UsageError
from megatron_hetero.serving.fleet.file import load_serving_plan
from megatron_hetero.serving.route.weights import targets_of

DESCRIPTION = """\
Hand requests to the replicas of a serving plan, each its share: for tests, and for
a few replicas that were started over ssh.  Engines have routers of their own, which
look at load; `launch` writes their commands.

  megatron-hetero route serve.json --replica replica-0=http://127.0.0.1:8100 \\
      --replica replica-1=http://127.0.0.1:8101

A client may name its class of the workload in the header X-Request-Class.  Needs
the extra serve."""
TAKES_MEGATRON_FLAGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `route`."""
    parser.add_argument("plan", type=Path, metavar="SERVE.JSON", help="the plan")
    parser.add_argument(
        "--replica", action="append", default=[], metavar="NAME=URL",
        help="where a replica of the plan answers; for each of them",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="to listen on (default: 8000)")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Route until stopped."""
    if not 1 <= arguments.port <= 65535:
        raise UsageError(f"--port {arguments.port} is not between 1 and 65535")
    urls: dict[str, str] = {}
    # NAME=URL, each name once.
    for word in arguments.replica:
        name, equals, url = word.partition("=")
        if not equals or not url.startswith(("http://", "https://")):
            raise UsageError(f"--replica {word}: write NAME=http://HOST:PORT")
        if name in urls:
            raise UsageError(f"--replica {word}: {name} has the address {urls[name]} already")
        urls[name] = url
    targets = targets_of(load_serving_plan(arguments.plan), urls)
    if importlib.util.find_spec("aiohttp") is None:
        raise EnvironmentMismatchError(
            'aiohttp is not installed; pip install ".[serve]" in a clone'
        )
    from aiohttp import web

    from megatron_hetero.serving.route.clients import KEPT_ALIVE_S, base_url
    from megatron_hetero.serving.route.router import RequestRouter

    output.show(f"routing on {base_url(arguments.host, arguments.port)}")
    try:
        web.run_app(
            RequestRouter(targets).application(),
            host=arguments.host,
            port=arguments.port,
            print=None,
            access_log=None,
            # A client that goes away ends the replica's work for it; one that sends nothing, waits.
            handler_cancellation=True,
            keepalive_timeout=KEPT_ALIVE_S,
        )
    except OSError as error:
        raise EnvironmentMismatchError(
            f"cannot listen on {arguments.host}:{arguments.port}: {error.strerror}; choose another "
            "--port"
        ) from error
    return 0
