"""A fleet's minutes, event by event: what requests wait for that rates do not know.

queue     one replica: continuous batching, chunks of prompts, blocks of keys and values
transfer  keys and values on links that others use too
router    which replica gets a request
run       arrivals, events, and what came of each request
outcome   waiting times and kept deadlines, by class
"""
