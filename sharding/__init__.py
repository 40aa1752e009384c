"""Device meshes, the rules that shard arrays over them, and the collectives between devices.

This package depends on no model, request or engine. A step runs as one `shard_map`, manual over all
mesh axes: each device computes on its own shards, and every collective is explicit.
"""
