"""A plan computed again as a person would on paper; imports nothing of megatron_hetero."""
