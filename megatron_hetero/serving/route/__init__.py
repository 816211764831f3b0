"""A small router for tests and for a few replicas started over ssh.

`weights` divides requests as the plan says, `router` hands them on over HTTP.
"""
