"""The `jaxinfer` command: one file for each subcommand."""
