"""Checkpoints and random states.

checkpoint     checkpoints with global shapes
random_states  random states of each place of a plan
"""
