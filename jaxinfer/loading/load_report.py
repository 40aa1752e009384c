"""What became of a checkpoint's weights: one line for the log."""

from __future__ import annotations

from collections import Counter

from absl import logging

from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.nn.quantized import Quantized


class LoadReport:
    """Collects, from several threads, which parameters were dequantized and why."""

    def __init__(self):
        self._dequantized: list[tuple[str, str]] = []  # path, reason

    def add_dequantized(self, path: str, why: str) -> None:
        self._dequantized.append((path, why))

    def log(self, model: FunctionalModel, weights: Weights) -> None:
        logging.info("%s", self.line(model, weights))

    def line(self, model: FunctionalModel, weights: Weights) -> str:
        """As `weights: 134.5M parameters, 96.5 MB on the device, 0.72 bytes each; packed: ...`."""
        count, size = model.num_parameters, sum(weight.nbytes for weight in weights)
        packed = sum(isinstance(weight, Quantized) for weight in weights)
        line = (
            f"weights: {count / 1e6:.1f}M parameters, {size / 1e6:.1f} MB on the device, "
            f"{size / count:.2f} bytes each"
        )
        if packed:
            line += f"; quantized: {packed} of {len(weights)} arrays"
        reasons = Counter(why for _, why in self._dequantized)
        examples = {why: path for path, why in reversed(self._dequantized)}
        for why, times in reasons.items():
            others = f" and {times - 1} more" if times > 1 else ""
            line += f"; dequantized: {examples[why]}{others}, because {why}"
        return line
