"""The preflight on the machines of a plan: facts of every rank, and values through every group."""
