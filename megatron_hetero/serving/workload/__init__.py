"""What is to be served: classes of requests, or a trace of them.

requests  classes and single requests, as data
schema    workload.yaml, field by field
load      from the file to classes
trace     traces as they are published
"""
