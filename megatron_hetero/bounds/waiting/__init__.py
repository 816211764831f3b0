"""Bounds for prices whose pipelines fill and drain, as other systems' cost models have them.

replicas  branch and bound over the number of replicas
prices    prices of GPUs that prove a step impossible
table     the cheapest chain of stages under a cap on every stage
counts    proofs with whole GPUs and whole replicas
"""
