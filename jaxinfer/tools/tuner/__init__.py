"""The autotuner: the GPU model that ranks tilings, the search, and the tuning files."""
