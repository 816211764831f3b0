"""Weights from Hugging Face folders into Megatron checkpoints, and back."""
