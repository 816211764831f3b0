"""The tree of errors that a user can cause, and the exit code of each.

Every message says what is wrong, which value, where (file, line, key), what is allowed and what to
do about it.  Anything else that escapes is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence

# Names in one message; more of them hide the rest of it.
_NUM_NAMED = 8
EXIT_RANK_DIED = 6
"""Exit code of a command that started ranks, after the death of a rank."""
EXIT_INTERRUPTED = 130
"""Exit code of a command that the user stopped (Ctrl-C): 128 + SIGINT."""


def some_of(names: Sequence[str], separator: str = ", ") -> str:
    """Write the first few names of a message, and how many more there are."""
    # The names that are not written.
    left_over = len(names) - _NUM_NAMED
    more = f" and {left_over} more"
    return separator.join(names[:_NUM_NAMED]) + (more if left_over > 0 else "")


class HeteroError(Exception):
    """Base of every error that the person at the terminal can mend."""

    exit_code = 2


class UsageError(HeteroError):
    """The command line contradicts itself, the plan or the model."""


class UnsupportedError(HeteroError):
    """The request is valid, but this version does not do it yet; the message names the feature."""


class LibraryError(UnsupportedError):
    """GPUs without a common communication library, or with a library that the runtime cannot train
    on."""


class InfeasiblePlanError(HeteroError):
    """No plan satisfies memory, shape and the user's limits; the message names a relaxation."""

    exit_code = 3


class FileFormatError(HeteroError):
    """A file is not well-formed: syntax, size, duplicate key, alias, NaN."""

    exit_code = 4


class ClusterError(FileFormatError):
    """cluster.yaml is readable but does not describe a usable cluster."""


class ModelError(FileFormatError):
    """The model description is missing something or describes an impossible model."""


class PlanFormatError(FileFormatError):
    """Plan or layout that breaks the grammar, the schema or an invariant."""


class ProfileError(FileFormatError):
    """profile.json holds values that no measurement can give."""


class CheckpointError(FileFormatError):
    """A checkpoint is missing, incomplete, or was made for another model."""


class EnvironmentMismatchError(HeteroError):
    """The machine is not what the plan needs: world size, host, GPU type, a missing package."""

    exit_code = 5


class MegatronVersionError(EnvironmentMismatchError):
    """Installed Megatron with private symbols that this package does not know."""


class CheckFailedError(HeteroError):
    """A check ran to its end and did not pass."""

    exit_code = 1


class BoundFaultWarning(RuntimeWarning):
    """A lower bound above the step of a plan in its scope: a fault of this program.

    The plan is right; it is given without a bound.
    """
