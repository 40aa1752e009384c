"""Record logits and tokens of Hugging Face transformers, so that the tests need no PyTorch.

    python tests/references/make_references.py

writes into tests/references/:

* `tiny_llama.npz`, `tiny_llama.json`: float32 logits of every checkpoint that
  `tests/support/tiny_checkpoints.py` makes, at a few positions of a few sequences, with each
  config and a digest of its weights;
* `smollm2_golden.json`: 64 greedy tokens for each prompt of `smollm2_prompts.json`, with the chosen
  token's logit and its lead over the second at every step (a lead under 1e-4 is a tie), and 64
  logits after the prompt: the 32 largest and 32 spread over the vocabulary.

Everything is computed in float32 with eager attention, one sequence at a time, on one thread;
running it twice with the same versions writes the same bytes. The logits are checked against the
float64 forward of `tests/support/reference_llama.py` before they are written. Needs torch and
transformers.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from absl import app, flags, logging
from tokenizers import Tokenizer, pre_tokenizers

from jaxinfer.loading.demo import demo_model_path
from jaxinfer.tools.bench.peer import cache_name, load_peer
from tests.support import reference_llama, tiny_checkpoints
from tests.support.paths import ROOT

FLAGS = flags.FLAGS
flags.DEFINE_string("gguf", None, "SmolLM2-135M-Instruct GGUF file; the demo model if not given.")
flags.DEFINE_string("out", str(ROOT / "tests" / "references"), "Folder to write into.")
flags.DEFINE_enum("only", "all", ["all", "tiny", "smollm2"], "Which references to make.")
flags.DEFINE_integer("num_tokens", 64, "Greedy tokens for each SmolLM2 prompt.", lower_bound=1)

TINY_TOLERANCE = 1e-4  # float32 against float64, checkpoints of two layers
SMOLLM2_TOLERANCE = 1e-3  # the same, 30 layers of real weights
NUM_TOP = 32
NUM_SPREAD = 32


def versions() -> dict[str, str]:
    """Return the versions of the packages whose arithmetic or tokenization is recorded."""
    packages = (torch, transformers, tokenizers, np)
    return {package.__name__: package.__version__ for package in packages}


def write_json(path: Path, head: dict[str, Any], name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write `head` and, under `name`, one line for each row, which is readable in a diff."""
    lines = [f' "{key}": {json.dumps(value, ensure_ascii=False)},' for key, value in head.items()]
    body = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("{\n" + "\n".join(lines) + f'\n "{name}": [\n{body}\n ]\n}}\n', "utf-8")


@torch.inference_mode()
def full_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Compute the logits [T, V] in float32 of one sequence, in one pass."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()


def require_close(what: str, got: np.ndarray, want: np.ndarray, tolerance: float) -> float:
    """Return the difference from the float64 reference; raise `ValueError` if it is too large."""
    difference = float(np.abs(got - want).max())
    if not difference <= tolerance:
        raise ValueError(
            f"{what}: transformers and tests/support/reference_llama.py differ by "
            f"{difference:.2e}, more than {tolerance:.0e}; one of them is wrong, so nothing "
            "was written"
        )
    return difference


def tiny_variant(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Record a tiny checkpoint: its JSON row, and logits [positions, V] by `name/index`."""
    tiny = tiny_checkpoints.VARIANTS[name]
    directory = tiny_checkpoints.write_checkpoint(name, folder / name)
    tensors, config = tiny_checkpoints.weights(tiny), tiny_checkpoints.config_json(tiny)
    sequences, arrays, worst = [], {}, 0.0
    for index, tokens in enumerate(tiny_checkpoints.token_sequences(tiny)):
        # A new model each time, because dynamic scaling remembers the longest sequence.
        model, _ = load_peer(directory, "float32", attention="eager")
        logits = full_logits(model, tokens)
        oracle = reference_llama.forward(config, tensors, tokens)
        worst = max(worst, require_close(f"{name}/{index}", logits, oracle, TINY_TOLERANCE))
        last = len(tokens) - 1
        positions = sorted({0, last // 3, 2 * last // 3, last - 1, last})
        arrays[f"{name}/{index}"] = logits[positions]
        sequences.append({"tokens": tokens, "positions": positions})
    logging.info("%-32s %d sequences, %.1e from float64", name, len(sequences), worst)
    digest = tiny_checkpoints.weights_sha256(tensors)
    row = {"name": name, "config": config, "weights_sha256": digest, "sequences": sequences}
    return row, arrays


def make_tiny(out: Path) -> None:
    """Write `tiny_llama.npz` and `tiny_llama.json`."""
    rows, arrays = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in tiny_checkpoints.VARIANTS:
            row, recorded = tiny_variant(name, Path(folder))
            rows.append(row)
            arrays |= recorded
    np.savez(out / "tiny_llama.npz", **arrays)
    write_json(out / "tiny_llama.json", {"versions": versions()}, "variants", rows)


def prompt_tokens(tokenizer: Any, entry: dict[str, Any]) -> tuple[str, list[int]]:
    """Return the text of a prompt, by the chat template if it has messages, and its token ids.

    When it reads a GGUF file, transformers does not split digits one by one, as this model's
    tokenizer does. The prompts must not depend on that, so both tokenizations are compared.
    """
    text = entry.get("text")
    if text is None:
        text = tokenizer.apply_chat_template(
            entry["messages"], tokenize=False, add_generation_prompt=True
        )
    exact = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    exact.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    ids = exact.encode(text, add_special_tokens=False).ids
    if ids != tokenizer(text, add_special_tokens=False).input_ids:
        raise ValueError(f"prompt {entry['name']!r} is tokenized in two ways; choose another text")
    return text, ids


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """Generate greedy tokens, ignoring end-of-text, with each one's logit and lead over the second;
    return also the first logits."""
    tokens, chosen, leads, first_logits = [], [], [], torch.empty(0)
    ids, past = torch.tensor([list(prompt)]), {}
    for _ in range(num_tokens):
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **past)
        past = {cache_name(model): output[cache_name(model)]}
        logits = output.logits[0, -1]
        first_logits = first_logits if tokens else logits
        top = torch.topk(logits, 2)
        tokens.append(int(top.indices[0]))
        chosen.append(round(float(top.values[0]), 5))
        leads.append(float(f"{float(top.values[0] - top.values[1]):.4g}"))
        ids = top.indices[:1][None]
    top = torch.topk(first_logits, NUM_TOP).indices.tolist()
    stride = len(first_logits) // NUM_SPREAD
    spread = [i * stride for i in range(NUM_SPREAD)]
    values = [round(float(first_logits[i]), 5) for i in top + spread]
    return {
        "tokens": tokens,
        "chosen_logits": chosen,
        "leads": leads,
        "prompt_logits": {"ids": top + spread, "values": values},
    }


def make_smollm2(gguf_file: Path, out: Path, num_tokens: int) -> None:
    """Write `smollm2_golden.json` from the prompts in `smollm2_prompts.json`."""
    entries = json.loads((ROOT / "tests/references/smollm2_prompts.json").read_text("utf-8"))
    model, tokenizer = load_peer(gguf_file, "float32", attention="eager")
    config, tensors = reference_llama.read_gguf(gguf_file)
    rows, worst = [], 0.0
    for entry in entries:
        text, ids = prompt_tokens(tokenizer, entry)
        if len(ids) <= 40:  # short prompts only, because the float64 reference takes seconds
            oracle = reference_llama.forward(config, tensors, ids)
            logits = full_logits(model, ids)
            worst = max(worst, require_close(entry["name"], logits, oracle, SMOLLM2_TOLERANCE))
        result = greedy(model, ids, num_tokens)
        answer = tokenizer.decode(result["tokens"])
        logging.info(
            "%s (%d tokens, least lead %.1e): %r",
            entry["name"],
            len(ids),
            min(result["leads"]),
            answer,
        )
        named = {**entry, "text": text, "prompt_token_ids": ids, "answer": answer}
        rows.append(named | result)
    logging.info("logits within %.1e of float64", worst)
    head = {
        "versions": versions(),
        "model_sha256": hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        "dtype": "float32",
        "num_tokens": num_tokens,
    }
    write_json(out / "smollm2_golden.json", head, "prompts", rows)


def main(argv: Sequence[str]) -> None:
    """Make the chosen references."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    out = Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    if FLAGS.only in ("all", "tiny"):
        make_tiny(out)
    if FLAGS.only in ("all", "smollm2"):
        make_smollm2(Path(FLAGS.gguf or demo_model_path()), out, FLAGS.num_tokens)


if __name__ == "__main__":
    app.run(main)
