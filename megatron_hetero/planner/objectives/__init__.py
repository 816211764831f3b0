"""Plans where money or GPUs count: fewer machines, bounds, and the price of a whole run.

fewer            the strategy that leaves machines out
node_pools       machines that can be rented, counted
objective_bound  lower bounds of money and of GPUs
outcome          the cost of a whole run under a plan
"""
