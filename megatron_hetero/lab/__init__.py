"""Work that needs torch and is no training: verify, rehearse, probe, doctor, weights."""

# Hides a broken Transformer Engine before anything here imports Megatron.
import megatron_hetero.runtime  # noqa: F401
