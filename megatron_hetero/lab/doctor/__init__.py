"""The preflight on the machines of a plan.

command   `doctor --on-cluster`, on every rank
facts     what a process sees of its machine
exchange  values through one group, compared
meeting   how the ranks agree beside the groups under test
"""
