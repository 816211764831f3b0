"""Plans on some of the machines, where money or GPUs count.

fewer   the strategy
offers  machines that can be rented, counted
"""
