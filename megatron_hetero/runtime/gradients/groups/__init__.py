"""Exchanges of gradients by groups of machines.

grouped           one bucket, exchanged by groups of machines
rounds            an exchange plan run on one rank
pair_group        all-reduces of two ranks, in one order
"""
