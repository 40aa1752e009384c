"""Report in one log line how a checkpoint's weights were loaded."""

from __future__ import annotations

from collections import Counter

from absl import logging

from jaxinfer.kernels.quantized_matmul import QuantArray
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.nn.quantized import Quantized


class LoadReport:
    """Collects the parameters that could not be loaded as requested. Safe to use from threads."""

    def __init__(self):
        self._reasons: dict[tuple[str, str], str] = {}  # reason by (outcome, parameter path)

    def add(self, outcome: str, path: str, reason: str) -> None:
        """Record that a parameter was, for example, "dequantized", and the reason."""
        self._reasons[outcome, path] = reason

    def note_activations(self, path: str, dtype: str | None, weight: Quantized) -> None:
        """Record a weight whose activations should be quantized to `dtype` but are not."""
        if dtype is not None and isinstance(weight, QuantArray):
            reason = "their matmul takes unquantized activations"
            self.add(f"activations not quantized to {dtype}", path, reason)

    def log(self, model: FunctionalModel, weights: Weights) -> None:
        """Log the summary, as a warning if a parameter was not loaded as requested."""
        log = logging.warning if self._reasons else logging.info
        log("%s", self.summary(model, weights))

    def summary(self, model: FunctionalModel, weights: Weights) -> str:
        """Return, e.g., `weights: 134,515,008 parameters, 96.5 MB, 0.72 bytes each; ...`."""
        line = f"weights: {summarize_weights(model, weights)}"
        # Sorted, because threads add them in any order.
        notes = [((what, why), path) for (what, path), why in sorted(self._reasons.items())]
        counts = Counter(note for note, _ in notes)
        examples = {note: path for note, path in reversed(notes)}
        for (outcome, reason), times in counts.items():
            others = f" and {times - 1} more" if times > 1 else ""
            line += f"; {outcome}: {examples[outcome, reason]}{others}, because {reason}"
        return line


def summarize_weights(model: FunctionalModel, weights: Weights) -> str:
    """Return, e.g., `1,000 parameters, 0.5 MB, 0.50 bytes each; quantized: 30 of 40 arrays`."""
    count, size = model.num_parameters, sum(weight.nbytes for weight in weights)
    packed = sum(isinstance(weight, Quantized) for weight in weights)
    line = f"{count:,} parameters, {size / 1e6:,.1f} MB, {size / count:.2f} bytes each"
    return f"{line}; quantized: {packed} of {len(weights)} arrays" if packed else line
