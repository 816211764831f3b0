"""The release of Megatron that this package follows: the one place that names it.

Messages, guards and checks take the release from here; `docs/extend.md` says what else a new
release changes.
"""

from __future__ import annotations

RELEASE = "0.19"
"""Release of megatron-core whose sources were read."""
MEGATRON = f"Megatron {RELEASE}"
"""Name of the release in a message."""
FIRST, LAST = "0.19.0", "0.19.2"
"""Ends of the range that is tested (`tools/megatron_range.py`)."""
TESTED = f"{FIRST} to {LAST}"
"""Releases of megatron-core that carry the known sources."""
REQUIREMENT = "megatron-core>=0.19,<0.20"
"""Requirement of the package, as pip reads it; setup.py repeats it."""
INSTALL = f'pip install "{REQUIREMENT}"'
