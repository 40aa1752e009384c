"""Sampling: parameters of a request, their slots on the device, and the draw."""
