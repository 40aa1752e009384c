"""Meshes and sharding rules. Nothing here yet: an engine runs on one device (docs/scaling.md)."""
