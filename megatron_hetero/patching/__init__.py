"""Patches of a Megatron-LM tree, applied and reverted by hashes.

tree          which release a tree is, and whether it is patched
unified_diff  reading and applying a patch
"""
