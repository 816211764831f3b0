"""`megatron-hetero probe`: measure the model's pieces on this machine, for plans to stand on."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from megatron_hetero.cli.arguments import add_model_argument
from megatron_hetero.cli.output import Output
from megatron_hetero.cli.unread import refuse_unread
from megatron_hetero.cli.verify import require_runtime
from megatron_hetero.cluster.catalogue import named_exactly
from megatron_hetero.errors import UsageError
from megatron_hetero.model.load import load_workload
from megatron_hetero.units import format_bandwidth, format_bytes, format_duration

DESCRIPTION = """\
Measure embedding, decoder layer and head of a model on the GPUs of this machine
(or its CPU), at each tensor-parallel width and micro-batch size, and add them to
a profile.json that `plan --profile` takes.  Run it on one machine of each type,
and on a machine with unlike cards once for each of its types; all may write to
one file after each other.  What is in the file already is not measured again.
`--pairs` measures the paths between the cards instead, and `--links` exchanges over
them, for cluster.yaml; started by torchrun with one process on each machine,
`--links` measures the links between the machines.

  megatron-hetero probe --model pretrain.sh --gpu RTX-4090 -o profile.json
  megatron-hetero probe --pairs"""
TAKES_MEGATRON_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `probe`."""
    add_model_argument(parser, "as for `plan`")
    parser.add_argument(
        "--gpu", metavar="NAME",
        help="the GPU type as cluster.yaml calls it; of unlike cards only those of it are measured",
    )  # fmt: skip
    parser.add_argument(
        "--cards", type=_places, metavar="0,2",
        help="measure these cards, by their places on the PCI bus (default: those of the type; "
        "with --pairs all)",
    )  # fmt: skip
    parser.add_argument(
        "--pairs", action="store_true",
        help="measure latency and bandwidth between every two cards of this machine, unlike ones "
        "too, and print the lines for cluster.yaml; needs no --model and no --gpu",
    )  # fmt: skip
    parser.add_argument(
        "--links", action="store_true",
        help="measure exchanges of gradients among the cards of this machine, or among the "
        "processes that torchrun started, and print the link with what adding and several senders "
        "cost, for cluster.yaml; needs no --model and no --gpu",
    )  # fmt: skip
    parser.add_argument(
        "--widths", type=_numbers, default=(1,), metavar="1,2,4",
        help="tensor-parallel widths; each needs as many GPUs (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", type=int, metavar="N",
        help="GPUs that compute at the same time, as in training, where they share power and "
        "memory (default: all of the type; without GPUs as many processes as the widest width, 2 "
        "with --pairs, 4 with --links)",
    )  # fmt: skip
    parser.add_argument(
        "--micro-batch-sizes", type=_numbers, metavar="1,2",
        help="in sequences (default: the job's --micro-batch-size)",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=int, default=4, metavar="N",
        help="layers of the measured model (default: 4); fewer need less memory",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="S",
        help="about how long each width and size is measured (default: 5); with --links a tenth "
        "of it each exchange",
    )  # fmt: skip
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("profile.json"),
        metavar="PROFILE.JSON",
        help="the file to write, or to go on with (default: profile.json)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Measure, write, show."""
    # Refuse what does not go together; paths between cards are measurements of their own.
    if arguments.layers < 1 or not 0.1 <= arguments.seconds <= 600:
        raise UsageError("--layers is at least 1, --seconds from 0.1 to 600")
    if arguments.gpus is not None and arguments.gpus < 1:
        raise UsageError(f"--gpus {arguments.gpus}: at least 1 computes")
    if arguments.pairs and arguments.links:
        raise UsageError("--pairs and --links are two measurements; run one after the other")
    if arguments.pairs or arguments.links:
        kind, more = ("pairs", ()) if arguments.pairs else ("links", ("seconds",))
        what = f"--{kind} measures paths between cards alone"
        refuse_unread(arguments, add_arguments, (kind, *more, "cards", "gpus", "json"), what)
    if arguments.pairs:
        return _run_pairs(arguments, output)
    if arguments.links:
        return _run_links(arguments, output)
    if arguments.gpu is None:
        raise UsageError(
            "--gpu NAME is missing: the GPU type to measure, as cluster.yaml calls it (or --pairs "
            "or --links, for the paths between the cards of this machine)"
        )
    # The cards to measure: of the given type, or chosen by the user.
    workload = load_workload(
        arguments.model, arguments.megatron_args, environment=dict(arguments.model_env)
    )
    require_runtime()
    command = importlib.import_module("megatron_hetero.lab.probe.command")
    probed = importlib.import_module("megatron_hetero.lab.probe.cards")
    # Plans look times up by the catalogue's name.
    gpu = named_exactly(arguments.gpu) or arguments.gpu
    cards = probed.chosen_cards(probed.visible_cards(), gpu, arguments.cards)
    request = command.ProbeRequest(
        workload=workload,
        gpu=gpu,
        widths=arguments.widths,
        micro_batch_sizes=arguments.micro_batch_sizes or (workload.training.micro_batch_size,),
        num_layers=min(arguments.layers, workload.model.num_layers),
        seconds=arguments.seconds,
        output=arguments.output,
        # As in training all cards of the type compute at once.
        num_busy=arguments.gpus or len(cards) or max(arguments.widths),
        cards=cards,
    )
    if not cards:
        output.note(f"torch sees no GPU on this machine: this measures its CPU, as {gpu}")
    with output.progress("measuring") as on_progress:
        measured = command.probe(request, on_progress)
    if arguments.json:
        output.json({"profile": str(arguments.output), "measured": list(command.summary(measured))})
        return 0
    for found in measured:
        output.show(*_lines(found.width, found.result))
    output.show(f"Written to {arguments.output}; next: megatron-hetero plan --profile")
    return 0


def _run_pairs(arguments: argparse.Namespace, output: Output) -> int:
    require_runtime()
    probed = importlib.import_module("megatron_hetero.lab.probe.cards")
    pairs = importlib.import_module("megatron_hetero.lab.probe.pairs")
    cards = probed.visible_cards()
    if arguments.cards is not None:
        cards = probed.cards_at(cards, arguments.cards)
    # Without cards processes on the CPU stand for them.
    count = len(cards) or arguments.gpus or 2
    if count < 2:
        raise UsageError("--pairs needs two cards; only one is measured here")
    with output.progress("measuring") as on_progress:
        on_progress(f"the paths between {count} cards, two at a time")
        found = pairs.measure_pairs(cards, count)
    lines = list(pairs.machine_lines(found))
    if arguments.json:
        measured = [
            {"cards": list(pair), "latency_s": fit.latency_s, "bytes_per_s": fit.bytes_per_s}
            for pair, fit in found.items()
        ]
        output.json({"pairs": measured, "cluster_yaml": lines})
        return 0
    names = {card.place: f" ({card.name})" for card in cards}
    for (one, other), fit in found.items():
        output.show(
            f"  cards {one}{names.get(one, '')} and {other}{names.get(other, '')}: "
            f"{format_bandwidth(fit.bytes_per_s)}, latency {format_duration(fit.latency_s)}"
        )
    output.show("In cluster.yaml, below the `gpus` of this machine:", *lines)
    return 0


def _run_links(arguments: argparse.Namespace, output: Output) -> int:
    require_runtime()
    links = importlib.import_module("megatron_hetero.lab.probe.links")
    fits = importlib.import_module("megatron_hetero.lab.probe.link_fit")
    each_s = arguments.seconds / 10
    # Under torchrun this process is one rank, and only the first has a result.
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK")):
        count = int(os.environ["WORLD_SIZE"])
        measured = links.measure_in_world(each_s) if count > 1 else ()
        if measured is None:
            return 0
    else:
        probed = importlib.import_module("megatron_hetero.lab.probe.cards")
        cards = probed.visible_cards()
        if arguments.cards is not None:
            cards = probed.cards_at(cards, arguments.cards)
        count = len(cards) or arguments.gpus or 4
        measured = ()
        if count > 1:
            with output.progress("measuring") as on_progress:
                on_progress(f"exchanges among 2 to {count} ranks")
                measured = links.measure_links(cards, count, each_s)
    if not measured:
        raise UsageError("--links needs two cards or processes; only one is measured here")
    # All constants, and how well they predict sizes that were left out.
    fit, errors = fits.fit_genmodel(measured), fits.held_out(measured)
    lines = list(fits.fit_for_cluster_file(measured).cluster_lines())
    if arguments.json:
        output.json(
            {
                "exchanges": [asdict(each) for each in measured],
                "residuals": fit.errors(measured).tolist(),
                "fit": asdict(fit),
                "held_out": {
                    "genmodel": errors.genmodel.tolist(),
                    "alpha_beta_gamma": errors.simpler.tolist(),
                },
                "cluster_yaml": lines,
            }
        )
        return 0
    output.show(
        f"{len(measured)} exchanges among 2 to {count} ranks, "
        f"{format_bytes(measured[0].num_bytes)} to {format_bytes(measured[-1].num_bytes)}",
        f"  fitted to every second size, the others are predicted within "
        f"{_mean(errors.genmodel):.0%} on average; by latency, bandwidth and additions alone "
        f"within {_mean(errors.simpler):.0%}",
        "In cluster.yaml, as the link between them:",
        *lines,
    )
    return 0


def _mean(errors: Sequence[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


def _lines(width: int, result: dict[str, Any] | None) -> Iterator[Text]:
    yield Text(f"Tensor-parallel width {width}", style="bold")
    # All points of this width were in the file.
    if result is None:
        yield Text("  in the file already")
        return
    for piece in result["pieces"]:
        yield Text(
            f"  {piece['piece']:<14} micro-batch {piece['micro_batch_size']:<3} forward "
            f"{format_duration(piece['forward_s']):>9}  backward "
            f"{format_duration(piece['backward_s']):>9}  spread {piece['spread']:.0%}"
        )
    for size in result["too_large"]:
        yield Text(f"  micro-batch {size}: does not fit into memory", style="yellow")
    for rate in result["rates"]:
        shape = " x ".join(map(str, rate["shape"]))
        value = (
            format_bandwidth(rate["value"])
            if rate["what"] == "memory"
            else f"{rate['value'] / 1e12:.3g} TFLOPS"
        )
        yield Text(f"  {rate['what']:<14} {shape:<22} {value}")
    if result["launch_s"] is not None:
        yield Text(f"  host           {format_duration(result['launch_s'])} for each operator")
    for what, name in (("context", "context_bytes"), ("NCCL, of two", "communicator_bytes")):
        if result[name] is not None:
            yield Text(f"  {what:<14} {format_bytes(result[name])}")
    if result["free_bytes"] is not None:
        yield Text(f"  free memory    {format_bytes(result['free_bytes'])}")
    # Only a width of several ranks measures the path between two.
    link = result["link"]
    if link is not None:
        yield Text(
            f"  between two    {format_bandwidth(link['bytes_per_s'])}, latency "
            f"{format_duration(link['latency_s'])} (for links of cluster.yaml)"
        )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a list of numbers like 1,2,4") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: the least is 1")
    return tuple(sorted(set(values)))


def _places(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text} is not a list of places like 0,2")
    return tuple(sorted({int(word) for word in words}))
