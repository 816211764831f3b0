"""A small router for tests and for a few replicas started over ssh.

weights   shares of replicas in the requests of a class
router    requests handed on over HTTP
"""
