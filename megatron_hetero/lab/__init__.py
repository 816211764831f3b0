"""Work that needs torch and is not training.
Rooms: `verify` (a plan beside one process), `rehearse` (a plan in slow motion on this machine),
`probe` (measured speeds), `doctor` (checks of machines), `data` (encoded text) and `huggingface`
(weights).
"""

# Hides a broken Transformer Engine before anything here imports Megatron.
import megatron_hetero.runtime  # noqa: F401
