"""The `jaxinfer` command: `main.py` dispatches, and each subcommand is a module of its own."""
