"""Plans on some of the machines, where money or GPUs count.

fewer       the strategy
node_pools  machines that can be rented, counted
"""
