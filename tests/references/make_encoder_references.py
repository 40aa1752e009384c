"""Record the hidden states that transformers computes for the tiny encoders of the tests.

    python tests/references/make_encoder_references.py

writes into tests/references/families/, for the cases of `tests/support/families_encoders.py`:

* `encoders.json`: by case its config, the names and shapes of the tensors that transformers saves
  for it, and the token sequences with the positions recorded;
* `encoders.npz`: float32 hidden states after the last block at these positions, by `case/index`.

Everything is float32 with eager attention, one sequence at a time. Needs torch and transformers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from absl import app
from safetensors import safe_open

from tests.support.families_encoders import CASES
from tests.support.family_bench import REFERENCES, FamilyCase, make_tensors, write_huggingface


def saved_shapes(case: FamilyCase, folder: Path) -> dict[str, list[int]]:
    """Return names and shapes of the tensors that transformers saves for the case's config."""
    config = transformers.AutoConfig.from_pretrained(write_huggingface(case, {}, folder / "config"))
    transformers.AutoModel.from_config(config, dtype=torch.float32).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@torch.inference_mode()
def record(
    name: str, case: FamilyCase, folder: Path
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the JSON row of a case, and its hidden states."""
    shapes = saved_shapes(case, folder)
    made = write_huggingface(case, make_tensors(shapes, case.seed), folder / "made")
    model = transformers.AutoModel.from_pretrained(
        made, dtype=torch.float32, attn_implementation="eager"
    )
    sequences, arrays = [], {}
    for index, tokens in enumerate(case.sequences()):
        last = len(tokens) - 1
        positions = sorted({0, last // 3, 2 * last // 3, last - 1, last})
        hidden = model(torch.tensor([tokens])).last_hidden_state[0].numpy()
        arrays[f"{name}/{index}"] = hidden[positions]
        sequences.append({"tokens": tokens, "positions": positions})
    return {"config": case.config_json, "shapes": shapes, "sequences": sequences}, arrays


def main(argv: Sequence[str]) -> None:
    """Record every case."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    rows, arrays = {}, {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows[name], recorded = record(name, case, Path(folder))
        arrays |= recorded
    np.savez_compressed(REFERENCES / "encoders.npz", **arrays)
    lines = [f'  "{name}": {json.dumps(row)}' for name, row in rows.items()]
    head = f' "transformers": "{transformers.__version__}",\n "cases": {{\n'
    body = "{\n" + head + ",\n".join(lines) + "\n }\n}\n"
    (REFERENCES / "encoders.json").write_text(body, "utf-8")


if __name__ == "__main__":
    app.run(main)
