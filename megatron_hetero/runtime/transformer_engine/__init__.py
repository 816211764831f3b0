"""Transformer Engine's own layers, also without a GPU; no file of the package is edited.

installed        whether the installed package can be used as it is (on GPUs)
cards_at_import  the card's capability for its import, without CUDA
attention        which kernel it has for a job's attention
layers           which layers this process has: Transformer Engine's or only local ones
finder           the import hook that gives our module in the place of the compiled one
bridges          the few lines of the package that ask for CUDA, and what stands there instead
compiled         the module in the place of the compiled one
"""
