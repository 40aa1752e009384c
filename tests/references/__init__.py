"""Recorded reference values, and the programs that record them."""
