"""Facts about the chips that the tools compile and plan for, as TOML."""
