"""One rank of a probe: a process of its own, started by `lab.probe.command`.

    python -m megatron_hetero.lab.probe.rank SPEC.json RESULT.json

The environment gives rank, world and store, as for `runtime.job.local`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_hetero.errors import HeteroError
from megatron_hetero.files import read_json
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.transformer_engine import layers


def main(spec_path: Path, result_path: Path) -> None:
    """Measure as the specification says; rank 0 writes the result."""
    spec = read_json(spec_path).data
    # The layers that the job names have to be there before the first import of Megatron.
    layers.provide_for(spec["megatron"])
    from megatron.core import parallel_state

    from megatron_hetero.lab.probe import machine
    from megatron_hetero.lab.probe.launching import measured_launch_s
    from megatron_hetero.lab.probe.pieces import PieceProbe, ProbeDoneError, TooLarge
    from megatron_hetero.runtime.job import entry

    rank = int(os.environ["RANK"])
    if not backend.cuda_is_usable():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # CUDA's own memory, before Megatron takes any.
    context = machine.context_bytes()
    # The pieces are measured inside of Megatron's training, on its model.
    probe = PieceProbe(tuple(spec["micro_batch_sizes"]), spec["seconds"])
    try:
        entry.main(spec["megatron"], observer=probe)
    except ProbeDoneError as done:
        pieces = done.result
    else:
        raise RuntimeError("Megatron ended without having built a model")
    result: dict[str, Any] = {
        "pieces": [asdict(p) for p in pieces if not isinstance(p, TooLarge)],
        "too_large": [p.micro_batch_size for p in pieces if isinstance(p, TooLarge)],
        "free_bytes": machine.free_bytes(),
        "gpu": torch.cuda.get_device_name() if backend.cuda_is_usable() else None,
        "cuda": torch.version.cuda,
        "rates": [],
        "link": None,
        "all_reduce": [],
        "launch_s": None,
        "context_bytes": context,
        "communicator_bytes": machine.communicator_bytes(),
    }
    # One GPU measures itself, several their links.
    if spec["width"] == 1:
        rates = machine.device_rates(**spec["shapes"])
        result["rates"] = [asdict(rate) for rate in rates]
        result["launch_s"] = measured_launch_s()
    else:
        result["link"] = asdict(machine.link_between(0, 1))
        group = parallel_state.get_tensor_model_parallel_group()
        result["all_reduce"] = machine.all_reduce_rates(group)
    if rank == 0:
        result_path.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    code = 0
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except HeteroError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    # Process groups of a job that never trained have nothing to say goodbye for.
    os._exit(code)
