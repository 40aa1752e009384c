"""Embed texts on this machine with an encoder: BERT, RoBERTa, or a sentence model built on one.

    jaxinfer embed --model=PATH --text="A cat sat on the mat" --text="Another text"
    jaxinfer embed --model=PATH --texts_file=texts.jsonl --prompt_name=query --truncate

`--texts_file` names a file with one JSON string on each line; "-" is stdin. stdout gets one JSON
object for each text, in order, and nothing else: index, text, num_tokens, embedding. Pooling,
normalization and prompts are the checkpoint's unless a flag says otherwise. Either all texts are
embedded or none: a text that cannot be is named on stderr, and the exit code is 2.
`--config=PRESET` and `--set key.path=value` reach every option of the engine.
"""

from __future__ import annotations

import json
import sys

from absl import flags

from jaxinfer import LLM, CheckpointError, ConfigError, InvalidRequestError, load_config
from jaxinfer.build import describe_weights, need_embedder
from jaxinfer.cli.json_strings import read_json_strings
from jaxinfer.embedding.embedder import Embedder
from jaxinfer.embedding.sentences import encode_texts

FLAGS = flags.FLAGS
_MODEL = flags.DEFINE_string(
    "model", None, "a Hugging Face directory, a .gguf file, or a hub id", required=True
)
_TEXT = flags.DEFINE_multi_string("text", [], "a text; may be repeated")
_TEXTS_FILE = flags.DEFINE_string(
    "texts_file", None, 'a file with one JSON string on each line, or "-"'
)
_PROMPT_NAME = flags.DEFINE_string(
    "prompt_name",
    None,
    "name of the checkpoint's prompt to put before each text; its default if unset",
)
_NORMALIZE = flags.DEFINE_bool(
    "normalize", None, "scale vectors to length 1; unset: as the checkpoint says"
)
_DIMENSIONS = flags.DEFINE_integer(
    "dimensions", None, "keep only this many leading components of each vector"
)
_TRUNCATE = flags.DEFINE_bool("truncate", False, "cut texts that are too long")
_CONFIG = flags.DEFINE_string("config", None, "a preset's name or a .toml file")
_SET = flags.DEFINE_multi_string("set", [], "engine option, key.path=value; may be repeated")

HELP = {
    "Model": ("model", "config", "set"),
    "Texts": ("text", "texts_file", "prompt_name", "truncate"),
    "Vectors": ("dimensions", "normalize"),
}


def print_plan(embedder: Embedder) -> None:
    """Print what will run, before its programs are compiled."""
    print(f"{embedder.name}: {describe_weights(embedder)}", file=sys.stderr)


def run() -> int:
    """Load the encoder and print a vector for each text; the return value is an exit code."""
    if bool(_TEXT.value) == (_TEXTS_FILE.value is not None):
        raise ValueError("give either --text or --texts_file")
    texts = _TEXT.value or read_json_strings(_TEXTS_FILE.value or "")
    config = load_config(_CONFIG.value, _SET.value)
    llm = LLM(
        _MODEL.value or "", config, on_loaded=lambda loaded: print_plan(need_embedder(loaded))
    )
    options = {"prompt_name": _PROMPT_NAME.value, "truncate": _TRUNCATE.value}
    all_ids = encode_texts(llm.embedder, texts, **options)
    vectors = llm.embed(all_ids, normalize=_NORMALIZE.value, dimensions=_DIMENSIONS.value)
    for index, (text, ids, vector) in enumerate(zip(texts, all_ids, vectors, strict=True)):
        row = {"index": index, "text": text, "num_tokens": len(ids)}
        print(json.dumps({**row, "embedding": vector.tolist()}, ensure_ascii=False))
    return 0


def main(argv: list[str]) -> int:
    """Embed the texts that the flags give, and return an exit code."""
    del argv
    try:
        return run()
    except BrokenPipeError:  # an OSError that is no fault of the options
        raise
    except (CheckpointError, ConfigError, InvalidRequestError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
