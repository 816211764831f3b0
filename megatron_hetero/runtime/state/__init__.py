"""Checkpoints and random states.

checkpoint        checkpoints with global shapes
stock_optimizer   the state of stock's distributed optimizer
random_states     random states of each place of a plan
folders           folders of saves under way, published, replaced and kept
manifest          the files of a checkpoint, with sizes and digests
saving            a save that is there whole or not at all
by_rank_0         acts of rank 0, whose failure all ranks hear
lock              one job at a time saves in a folder
choosing          the checkpoint that a job goes on from, checked before it is read
metadata_reading  torch's `.metadata` without trusting pickle
other_layers      checkpoints between Transformer Engine's layers and local ones
coverage          every element of every tensor exactly once
safety            saves, loads and choices in Megatron's places
"""
