"""The tile of the batch-invariant mode, in which no result depends on what shares the batch."""

INVARIANT_TILE = 16  # tokens computed together, always this many
