"""The compile gate: every kernel and preset, compiled for chips that are not present."""
