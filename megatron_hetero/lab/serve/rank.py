"""One rank of a served replica: Megatron builds and loads its part of the model on the runtime's
groups, and in the place of training the engine runs.

    torchrun ... -m megatron_hetero.lab.serve.rank <Megatron flags> --hetero-layout "tp2:3,tp1:1"
        --load CHECKPOINT --serve-port 8100
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import lcm
from typing import Any

import torch

from megatron_hetero.errors import HeteroError, UsageError
from megatron_hetero.flags.support.rules import refuse
from megatron_hetero.lab.serve.attention import (
    CachedAttention,
    ServedStep,
    rotary_hook,
    set_served_step,
)
from megatron_hetero.lab.serve.batch import BLOCK_TOKENS
from megatron_hetero.lab.serve.channel import Channel
from megatron_hetero.lab.serve.engine import ServingEngine, follow
from megatron_hetero.lab.serve.scheduler import Capacity
from megatron_hetero.lab.serve.stage import Observer, StageRunner
from megatron_hetero.lab.serve.support import REFUSED, SERVED_FLAGS, checked_plan
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.arguments import given_plan, split_arguments
from megatron_hetero.runtime.job.entry import ARGUMENT_DEFAULTS
from megatron_hetero.runtime.job.meeting import MEETING
from megatron_hetero.runtime.job.steps import job_of
from megatron_hetero.runtime.job.world import World


@dataclass(frozen=True)
class ServeOptions:
    """Settings of a served replica: where it listens, what it holds at once, and which tokens end
    an answer beside the tokenizer's own (numbers with commas)."""

    host: str = "127.0.0.1"
    port: int = 8100
    name: str = "model"
    kv_tokens: int = 16384
    max_sequences: int = 64
    step_tokens: int = 512
    answer_limit_s: float = 60.0
    end_tokens: str = ""


Front = Callable[[ServingEngine, Any, ServeOptions], Callable[[], None]]
"""What feeds the engine on the first rank, from threads of its own; it is given Megatron's
tokenizer, and returns the function that ends it."""


def serve_rank(
    argv: Sequence[str],
    options: ServeOptions,
    front: Front,
    observe: Observer | None = None,
) -> None:
    """Serve as one rank, until the front ends.

    Args:
        argv: Megatron's flags, with the layout and the checkpoint.
        options: settings of the replica, equal on all ranks.
        front: feeds the first rank.
        observe: sees the logits on the rank that draws.
    Raises:
        HeteroError: model, layout and machine contradict each other, or are not supported.
        RuntimeError: another rank is gone.
    """
    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_hetero.runtime.model import gpt
    from megatron_hetero.runtime.model.spec_parts import with_parts

    with MEETING.refusals_told():
        MEETING.announce(World.from_environment())
        # Flags of the replica come last and win.
        words = (*argv, *SERVED_FLAGS, f"--global-batch-size={1}")
        plan = checked_plan(given_plan(split_arguments(words)))
        # Megatron divides experts among a tensor-parallel group with sequence parallelism alone.
        widths = [stage.shape.tensor_parallel for stage in plan.replicas[0].stages]
        if max(widths) > 1 and "--num-experts" in (word.partition("=")[0] for word in words):
            words = (*words, "--sequence-parallel")
        job = job_of(words, in_our_runtime=True)
        args = job.parse(parse_and_validate_args, args_defaults=ARGUMENT_DEFAULTS)
        refuse(REFUSED, args, "These models cannot be served here yet:")
        # Steps have unlike lengths, so that all ranks of neighbouring stages may exchange pieces.
        args.variable_seq_lengths = True
        capacity = capacity_of(plan, options, args.seq_length)
        model = job.configure(gpt_config_from_args, args)
        served = ServedStep(capacity.num_blocks)
        set_served_step(model.transformer, served)
        # Megatron's layers, with the attention that finds earlier keys and values.
        original = model.transformer_layer_spec
        model.transformer_layer_spec = lambda *given, **named: with_parts(
            original(*given, **named), {_core_attention(): CachedAttention}
        )
        model.pre_wrap_hooks.append(rotary_hook(served, args.seq_length))
    config = pretrain_cfg_container_from_args(args, model)

    def serve(config: Any, *_: Any, p2p_communicator: Any, pg_collection: Any, **__: Any) -> None:
        """Stand in the place of Megatron's `pretrain`."""
        from megatron.training import get_tokenizer

        loaded = _loaded(config, pg_collection)
        tokenizer = get_tokenizer()
        # The first rank of the last stage draws.
        stages = plan.replicas[0].stages
        drawing = sum(stage.shape.num_devices for stage in stages[:-1])
        channel = Channel(drawing, timedelta(seconds=options.answer_limit_s))
        runner = StageRunner(
            loaded, pg_collection, p2p_communicator, served, _vocabulary(tokenizer, args), observe
        )
        # Only the first rank has requests; the others do as they are told.
        if torch.distributed.get_rank() != 0:
            follow(channel, runner)
            return
        engine = ServingEngine(capacity)
        # What ends the ranks when one has died sends it first: requests are still told.
        signal.signal(signal.SIGTERM, lambda *_: engine.stop())
        end = front(engine, tokenizer, options)
        try:
            engine.run(channel, runner)
        finally:
            end()

    job.pretrain(
        serve, config, gpt.datasets_provider, ModelType.encoder_or_decoder, gpt.forward_step
    )


def _core_attention() -> Any:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    return DotProductAttention


def capacity_of(plan: Plan, options: ServeOptions, max_length: int) -> Capacity:
    """Return the limits of a replica.

    Raises:
        UsageError: a setting leaves no room for one token.
    """
    if options.kv_tokens < BLOCK_TOKENS or min(options.max_sequences, options.step_tokens) < 1:
        raise UsageError(
            f"{options.kv_tokens} tokens of keys and values, {options.max_sequences} sequences and "
            f"{options.step_tokens} tokens in a step serve nothing: give at least {BLOCK_TOKENS}, "
            "1 and 1"
        )
    # Tokens of a step have to divide by every width, for sequence parallelism.
    widths = [stage.shape.tensor_parallel for stage in plan.replicas[0].stages]
    return Capacity(
        options.kv_tokens,
        options.max_sequences,
        options.step_tokens,
        max_length,
        len(widths),
        lcm(*widths),
    )


def plan_of_layout(layout: str) -> Plan:
    """Return the plan of a layout without a number of micro-batches."""
    return plan_from_layout(parse_layout(layout if "@" in layout else f"{layout} @1"))


def _loaded(config: Any, groups: Any) -> list[Any]:
    """Build this rank's part of the model and load it, as Megatron's `pretrain` does."""
    from megatron.core.enums import ModelType
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import setup_model_and_optimizer

    initialize_megatron(
        skip_model_parallel_init=True,
        seed_pp_group=groups.pp,
        seed_dp_group=groups.dp,
        seed_tp_group=groups.tp,
        seed_ep_group=groups.ep,
        seed_etp_group=groups.expt_tp,
    )
    model, _, _ = setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        checkpointing_context={},
        cfg_container=config,
        pg_collection=groups,
    )
    return model


def _vocabulary(tokenizer: Any, args: Any) -> int:
    """Return the tokens that may be drawn: a tokenizer's, as far as the model has them."""
    return min(int(tokenizer.vocab_size), int(args.padded_vocab_size))


def main(argv: Sequence[str]) -> int:
    """Serve as one rank of `torchrun`; print what is refused."""
    from megatron_hetero.lab.serve.endpoint import endpoint

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # A flag `--serve-NAME` for each setting, with the setting's own type and default.
    for name, kind in ServeOptions.__annotations__.items():
        cast = {"int": int, "float": float}.get(str(kind), str)
        default = getattr(ServeOptions, name)
        parser.add_argument(f"--serve-{name.replace('_', '-')}", dest=name, type=cast,
                            default=default)  # fmt: skip
    given, megatron = parser.parse_known_args(list(argv))
    try:
        serve_rank(megatron, ServeOptions(**vars(given)), endpoint)
    except HeteroError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
