"""The start of a job on another machine, rank by rank, up to the configuration of its model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
from megatron.training import arguments
from megatron.training.argument_utils import gpt_config_from_args

from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.job.arguments import requested_plan, split_arguments
from megatron_hetero.runtime.job.asymmetric import AsymmetricJob
from megatron_hetero.runtime.job.entry import ARGUMENT_DEFAULTS
from megatron_hetero.runtime.job.rank_arguments import rank_arguments
from megatron_hetero.runtime.job.stock import needs_of
from megatron_hetero.runtime.job.world import World


class Megatron:
    """Megatron's functions as a job calls them; `error` is what the last one raised."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.error: BaseException | None = None

    def parse(self, args_defaults: Mapping[str, Any]) -> Any:
        """Parse and check `sys.argv`, as `parse_and_validate_args` does before it builds a
        tokenizer and opens loggers; flags that Megatron does not know are a script's own."""
        with self._noted():
            args = arguments.parse_args(ignore_unknown_args=True)
            arguments.validate_args(args, dict(args_defaults))
            init_num_microbatches_calculator(
                rank=args.rank,
                global_batch_size=args.global_batch_size,
                micro_batch_size=args.micro_batch_size,
                data_parallel_size=args.data_parallel_size,
                decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
                step_batch_size_schedule=args.step_batch_size_schedule,
                seq_length=args.seq_length,
            )
        # The tokenizer would say it, from files of other machines.
        args.vocab_size = args.vocab_size or self._vocab_size
        if args.padded_vocab_size is None:
            args.padded_vocab_size = vocab_size_with_padding(self._vocab_size, args)
        return args

    def configure(self, args: Any, **given: Any) -> Any:
        """Build the model's configuration, whose checks are Megatron's as well."""
        with self._noted():
            return gpt_config_from_args(args, **given)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = error
            raise


class _JobElsewhere(AsymmetricJob):
    """A job whose packages and checkpoints are those of other machines."""

    def _needs(self, named: dict[str, Any]) -> tuple[str, ...]:
        with suppress(EnvironmentMismatchError):
            return super()._needs(named)
        return ()

    def _check_files(self, args: Any) -> None:
        pass


class StockStart:
    """The start of a job of stock Megatron, whose flags are the same on every rank."""

    def __init__(self, argv: Sequence[str], megatron: Megatron) -> None:
        self._argv, self._megatron = tuple(argv), megatron

    def kind(self, rank: int) -> Any:
        """Return what tells ranks apart that Megatron's checks see differently."""
        return None

    def start(self, rank: int, num_ranks: int) -> None:
        """Start a rank up to its model's configuration, in this process.

        Raises:
            BaseException: the refusal.
        """
        # Megatron finds out while it opens its loggers, which nothing here does.
        with suppress(EnvironmentMismatchError):
            needs_of(self._argv, {"args_defaults": ARGUMENT_DEFAULTS})
        sys.argv = ["pretrain_gpt.py", *self._argv]
        self._megatron.configure(self._megatron.parse(ARGUMENT_DEFAULTS))


class PlugInStart:
    """The start of a job that needs the plug-in, as the plug-in's own entry makes it."""

    def __init__(self, argv: Sequence[str], megatron: Megatron) -> None:
        self._arguments, self._megatron = split_arguments(argv), megatron
        plan = requested_plan(self._arguments)
        assert plan is not None
        self._plan, self._places = plan, rank_table(plan)

    def kind(self, rank: int) -> Any:
        """As in `StockStart`."""
        place = self._places[rank]
        stage = self._plan.replicas[place.replica].stages[place.stage]
        words = rank_arguments(self._plan, place, self._arguments.megatron)
        # The last rank alone has writers, which nothing here opens.
        words = tuple(w for w in words if w not in ("--tensorboard-dir=", "--wandb-project="))
        shares = stage.shape.shares
        own = None if shares is None else (shares, place.tensor_rank)
        return words, stage.precision, stage.recompute, stage.recompute_num_layers, own

    def start(self, rank: int, num_ranks: int) -> None:
        """As in `StockStart`."""
        job = _JobElsewhere(self._plan, self._arguments, World(rank, num_ranks, is_local=True))
        args = job.parse(self._megatron.parse, args_defaults=ARGUMENT_DEFAULTS)
        job.configure(self._megatron.configure, args)
