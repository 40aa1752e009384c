"""Several devices: sharded models, pipelines, replicas, and engines over several hosts."""
