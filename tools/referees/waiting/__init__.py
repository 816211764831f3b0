"""Bounds for prices whose pipelines fill and drain, as other systems' cost models have them.

bound     the lower bound of a job, put together
rules     what such prices state of themselves
replicas  branch and bound over the number of replicas
prices    prices of GPUs that prove a step impossible
kinds     ways to make a stage
table     the cheapest chain of stages under a cap on every stage
counts    proofs with whole GPUs and whole replicas
share     work that replicas have to do together
"""
