"""Parts of `tune_kernels.py`: the model of a GPU that ranks tilings, the search, the files."""
