"""Settings of all tests."""

from __future__ import annotations

import hypothesis

# Machines of CI are shared: a slow example is no fault.  Whole tests have pytest's timeout.
hypothesis.settings.register_profile("megatron-hetero", deadline=None)
hypothesis.settings.load_profile("megatron-hetero")
