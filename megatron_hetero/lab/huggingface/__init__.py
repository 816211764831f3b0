"""Weights from Hugging Face folders into Megatron checkpoints, and back.

families       tensors of Hugging Face for each parameter of Megatron
folder         a Hugging Face model folder
job            the process that copies weights
trained_model  the checkpoint's model beside that of config.json
"""
