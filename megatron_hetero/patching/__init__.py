"""The hook in a Megatron-LM source tree: recognise the tree, apply the patch, revert it."""
