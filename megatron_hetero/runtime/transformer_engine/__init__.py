"""Transformer Engine's own layers on a machine without a GPU.

The package `transformer-engine` is Python alone; what is compiled lies in another,
`transformer_engine_torch`, of which `kernels` has in plain torch what the layers call without fp8.
No file of the package is edited.

installed  whether the installed package can be used as it is (on GPUs)
layers     which layers this process has: Transformer Engine's or only local ones
finder     the import hook that gives our module in the place of the compiled one
bridges    the few lines of the package that ask for CUDA, and what stands there instead
compiled   the module in the place of the compiled one
kernels    its functions
"""
