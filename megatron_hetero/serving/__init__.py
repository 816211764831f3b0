"""Which replicas serve which requests on unlike GPUs.

Engines, routers and KV transfer are other people's.  Rooms: compose.
"""
