"""Weights from Hugging Face folders into Megatron checkpoints, and back.

families  which tensors make up which parameter
folder    a Hugging Face model folder
job       the process that copies weights
"""
