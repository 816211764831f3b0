"""Settings of all tests."""

from __future__ import annotations

import hypothesis

# Machines of CI are shared: a slow example is no fault.  Whole tests have pytest's timeout.
# A run says the same of the same code: what fails is a fault of the change at hand.  New examples
# are for `--hypothesis-profile=random` and `tools/prove_planner.py`.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None, derandomize=False)
hypothesis.settings.load_profile("same")
