"""Convert a checkpoint once to the engine's own layout, quantized or not, in Orbax's format.

    jaxinfer convert --model=PATH --output=DIR --dtype=bfloat16
    jaxinfer convert --model=PATH --output=DIR --quantize=int8
    jaxinfer serve --model=DIR

DIR is complete: configuration, tokenizer and generation defaults are copied into it. It can be
restored in any `dtype` and on any number of devices, each of which reads its own part. The folder
appears whole or not at all. A CPU computes with dequantized weights, so for a CPU
`--weights=dequantized` makes starts faster. Exit code 2: the checkpoint or the options cannot be
used, and stderr says why.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from absl import flags
from tqdm import tqdm

from jaxinfer import CheckpointError, ConfigError, load_config
from jaxinfer.execution.numerics import numerics_for
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.load_report import summarize_weights
from jaxinfer.loading.orbax import write_converted
from jaxinfer.loading.output import check_output
from jaxinfer.loading.quantize import RECIPES

FLAGS = flags.FLAGS
_MODEL = flags.DEFINE_string(
    "model", None, '"demo", a .gguf file, a Hugging Face directory, or a hub id', required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "the folder to write", required=True)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "bfloat16",
    ["float32", "bfloat16", "float16"],
    "the type of weights that are not quantized",
)
_WEIGHTS = flags.DEFINE_enum(
    "weights", "packed", ["packed", "dequantized"], "how quantized weights are stored"
)
_QUANTIZE = flags.DEFINE_enum(
    "quantize",
    None,
    sorted(RECIPES),
    "quantize the weights of matrix products that are not quantized yet",
)
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "replace the folder if it exists")


HELP = {
    "Model": ("model", "output", "overwrite"),
    "Weights": ("dtype", "quantize", "weights"),
}


def convert() -> None:
    """Load the checkpoint and write it converted."""
    output = Path(_OUTPUT.value).expanduser()
    check_output(None, output, overwrite=_OVERWRITE.value)  # before the work, not after it
    start = time.perf_counter()
    checkpoint = open_checkpoint(_MODEL.value)
    check_output(checkpoint.path, output, overwrite=_OVERWRITE.value)
    model = functional_model(
        checkpoint, numerics_for(load_config(overrides=[f"dtype={_DTYPE.value}"]))
    )
    units = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    # `disable=None`: no bar where stderr is not a terminal.
    with tqdm(total=model.num_bytes, desc="loading", disable=None, **units) as bar:
        weights = load_weights(
            checkpoint,
            model,
            keep_packed=_WEIGHTS.value == "packed",
            quantize=_QUANTIZE.value,
            on_progress=bar.update,
        )
    write_converted(
        checkpoint,
        model,
        weights,
        output,
        quantization=_QUANTIZE.value,
        overwrite=_OVERWRITE.value,
    )
    print(
        f"{output}: {checkpoint.name} ({model.family.name}); {summarize_weights(model, weights)}; "
        f"in {time.perf_counter() - start:.1f} s"
    )


def main(argv: list[str]) -> int:
    """Convert the checkpoint that the flags name, and return an exit code."""
    del argv
    try:
        convert()
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
