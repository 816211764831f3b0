"""Results of trying a plan out, for a terminal.

simulation       a simulated step
rehearsal        a rehearsal in processes on this machine
dealt_rehearsal  the same of dealt sequences
verification     losses and gradients beside those of one process (`verify`)
kit              checks of the runtime on this machine (`doctor --train`)
preflight        findings of `doctor` on a machine
"""
