"""Record the logits of transformers for the tiny checkpoints of every model family.

    python tests/references/make_family_references.py [--groups=dense,moe]

writes, for each group of `tests/support/family_groups.py`, into tests/references/families/:

* `<group>.json`: by case its config, the names and shapes of the tensors that transformers saves
  for it, and the token sequences with the positions recorded;
* `<group>.npz`: float32 logits at these positions, by `case/index`.

Everything is float32 with eager attention on one thread. Needs torch and transformers.
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
from absl import app, flags, logging
from safetensors import safe_open

from tests.support.family_bench import REFERENCES, FamilyCase, make_tensors, write_huggingface
from tests.support.family_groups import GROUPS

FLAGS = flags.FLAGS
flags.DEFINE_list("groups", sorted(GROUPS), "Groups to record.")


def saved_shapes(config_folder: Path, folder: Path) -> dict[str, list[int]]:
    """Return names and shapes of the tensors that transformers saves for a `config.json`."""
    config = transformers.AutoConfig.from_pretrained(config_folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@torch.inference_mode()
def logits_of(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    """Return the logits [T, V], of a new model each time, because dynamic RoPE has state."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()


def record(
    name: str, case: FamilyCase, folder: Path
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the JSON row of a case, and its logits."""
    written = write_huggingface(case, {}, folder / "config")
    shapes = saved_shapes(written, folder / "saved")
    written = write_huggingface(
        case, make_tensors(shapes, case.seed, case.norm_mean), folder / "made"
    )
    sequences, arrays = [], {}
    for index, tokens in enumerate(case.sequences()):
        last = len(tokens) - 1
        positions = sorted({0, last // 3, 2 * last // 3, last - 1, last})
        arrays[f"{name}/{index}"] = logits_of(written, tokens)[positions]
        sequences.append({"tokens": tokens, "positions": positions})
    largest = max(float(np.abs(a).max()) for a in arrays.values())
    logging.info("%-32s %d tensors, logits up to %.1f", name, len(shapes), largest)
    return {"config": case.config_json, "shapes": shapes, "sequences": sequences}, arrays


def record_group(group: str) -> None:
    """Write the two files of a group."""
    rows, arrays = {}, {}
    for name, case in GROUPS[group].items():
        with tempfile.TemporaryDirectory() as folder:
            rows[name], recorded = record(name, case, Path(folder))
        arrays |= recorded
    REFERENCES.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(REFERENCES / f"{group}.npz", **arrays)
    lines = [f'  "{name}": {json.dumps(row)}' for name, row in rows.items()]
    head = f' "transformers": "{transformers.__version__}",\n "cases": {{\n'
    body = "{\n" + head + ",\n".join(lines) + "\n }\n}\n"
    (REFERENCES / f"{group}.json").write_text(body, "utf-8")


def main(argv: Sequence[str]) -> None:
    """Record the chosen groups."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    for group in FLAGS.groups:
        record_group(group)


if __name__ == "__main__":
    app.run(main)
