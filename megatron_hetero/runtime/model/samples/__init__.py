"""Samples that replicas read, as a single process would.

data      the samples that each replica reads
datasets  the data sets of a job, packed ones among them
packed    documents packed into one sequence, and their attention
provider  providers of data sets, as Megatron calls them
"""
