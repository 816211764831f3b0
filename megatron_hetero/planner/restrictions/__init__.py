"""Restrictions that hold for a whole plan, settled before any structure is searched.

precision       the precision of a job that names none: what all GPUs have, or the faster
mixture         stages in precisions of their own, where the user asks for them
one_library     plans keep to one communication library
measured_sizes  micro-batch sizes that a profile speaks for
"""
