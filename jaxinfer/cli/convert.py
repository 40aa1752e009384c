"""Convert a checkpoint once: parameters as the engine holds them, quantized or not, by Orbax.

    python scripts/convert.py --model=PATH --output=DIR --dtype=bfloat16
    python scripts/convert.py --model=PATH --output=DIR --quantize=int8
    python scripts/serve.py --model=DIR

DIR then stands alone: configuration, tokenizer and generation defaults are copied. It is restored
on any number of devices, each reading its own part, and in any `dtype`; it appears whole or not at
all. For a CPU, which runs them dequantized, `--weights=dequantized` starts faster than quantized
ones. Exit status 2: the checkpoint or the options are of no use, and stderr says why.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from absl import app, flags, logging
from tqdm import tqdm

from jaxinfer import CheckpointError, ConfigError, load_config
from jaxinfer.execution.numerics import numerics_for
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.load_report import weights_line
from jaxinfer.loading.orbax import write_converted
from jaxinfer.loading.output import check_output
from jaxinfer.loading.quantize import RECIPES

FLAGS = flags.FLAGS
_MODEL = flags.DEFINE_string(
    "model", None, '"demo", a .gguf file, a Hugging Face directory, or a hub id', required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "the folder to write", required=True)
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["float32", "bfloat16", "float16"], "what is not quantized is stored so"
)
_WEIGHTS = flags.DEFINE_enum(
    "weights", "packed", ["packed", "dequantized"], "how weights that are quantized are stored"
)
_QUANTIZE = flags.DEFINE_enum(
    "quantize", None, sorted(RECIPES), "quantize products' weights that are not"
)
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "replace the folder if it is there")


def convert() -> None:
    output = Path(_OUTPUT.value).expanduser()
    check_output(None, output, overwrite=_OVERWRITE.value)  # before the work, not after it
    start = time.perf_counter()
    checkpoint = open_checkpoint(_MODEL.value)
    check_output(checkpoint.path, output, overwrite=_OVERWRITE.value)
    model = functional_model(
        checkpoint, numerics_for(load_config(overrides=[f"dtype={_DTYPE.value}"]))
    )
    units = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    # `disable=None`: no bar where stderr is no terminal.
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
        f"{output}: {checkpoint.name} ({model.family.name}); {weights_line(model, weights)}; "
        f"in {time.perf_counter() - start:.1f} s"
    )


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # jax reports each platform it does not find
    try:
        convert()
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    app.run(main)
