"""Preflight on the machines of a plan.

command   `doctor --on-cluster`, on every rank
facts     facts that a process sees of its machine
exchange  values through one group, compared
meeting   agreement of the ranks, beside the groups under test
"""
