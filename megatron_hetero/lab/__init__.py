"""Work that needs torch and is not training.
Rooms: `verify` (a plan beside one process), `rehearse` (a plan in slow motion on this machine),
`probe` (measured speeds), `doctor` (checks of machines), `kit` (the runtime tried on one machine),
`data` (encoded text), `huggingface` (weights) and `serve` (a replica that answers requests).
"""

# Hides a broken Transformer Engine before anything here imports Megatron.
import megatron_hetero.runtime  # noqa: F401
