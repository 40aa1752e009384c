"""Meshes, the rules by which arrays are split over them, and what the parts say to each other.

Nothing here knows a model, a request or an engine. A step runs as one `shard_map`, manual over all
axes: every device computes with its own parts, and collectives stand where they are needed and
nowhere else.
"""
