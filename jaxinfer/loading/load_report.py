"""What became of a checkpoint's weights: one line for the log."""

from __future__ import annotations

from collections import Counter

from absl import logging

from jaxinfer.kernels.quantized_matmul import QuantArray
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.nn.quantized import Quantized


class LoadReport:
    """Collects, from several threads, which parameters are not as was asked for, and why."""

    def __init__(self):
        self._notes: dict[tuple[str, str], str] = {}  # of what became of which path: why

    def add(self, what: str, path: str, why: str) -> None:
        self._notes[what, path] = why

    def note_activations(self, path: str, wanted: str | None, weight: Quantized) -> None:
        """Of a weight whose x was to be quantized to `wanted`, and is not."""
        if wanted is not None and isinstance(weight, QuantArray):
            why = "their product takes them as they are"
            self.add(f"activations not quantized to {wanted}", path, why)

    def log(self, model: FunctionalModel, weights: Weights) -> None:
        """As a warning where something is not as was asked for."""
        say = logging.warning if self._notes else logging.info
        say("%s", self.line(model, weights))

    def line(self, model: FunctionalModel, weights: Weights) -> str:
        """As `weights: 134,515,008 parameters, 96.5 MB, 0.72 bytes each; dequantized: ...`."""
        line = f"weights: {weights_line(model, weights)}"
        # Sorted: threads note them in any order.
        notes = [((what, why), path) for (what, path), why in sorted(self._notes.items())]
        counts = Counter(note for note, _ in notes)
        examples = {note: path for note, path in reversed(notes)}
        for (what, why), times in counts.items():
            others = f" and {times - 1} more" if times > 1 else ""
            line += f"; {what}: {examples[what, why]}{others}, because {why}"
        return line


def weights_line(model: FunctionalModel, weights: Weights) -> str:
    """As `134,515,008 parameters, 96.5 MB, 0.72 bytes each; quantized: 30 of 40 arrays`."""
    count, size = model.num_parameters, sum(weight.nbytes for weight in weights)
    packed = sum(isinstance(weight, Quantized) for weight in weights)
    line = f"{count:,} parameters, {size / 1e6:,.1f} MB, {size / count:.2f} bytes each"
    return f"{line}; quantized: {packed} of {len(weights)} arrays" if packed else line
