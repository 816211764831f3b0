"""A small router for tests and for a few replicas started over ssh.

weights   shares of replicas in the requests of a class
clients   limits of clients, and errors in their form
link      connections to a replica, and its signs of life
router    requests handed on over HTTP
"""
