"""Mixtures of experts on an asymmetric plan.

dealt_experts  whole experts dealt out to the ranks of a stage
expert_bias    bias of experts by the tokens of the whole job
experts        mixture of experts
"""
