"""Talk to a model in the terminal; /reset starts over, /exit ends the conversation.

    jaxinfer chat --model=demo --config=demo
    jaxinfer chat --model=PATH --temperature=0.7 --max_tokens=500

The flags are those of `jaxinfer generate`, of which this is `--chat`.
"""

from __future__ import annotations

from absl import flags

from jaxinfer.cli import generate

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(generate)
HELP = {
    "Model": generate.HELP["Model"],
    "Sampling": ("temperature", "max_tokens", "top_p", "top_k", "seed", "stop"),
}


def main(argv: list[str]) -> int:
    """Hold the conversation and return an exit code."""
    FLAGS["chat"].value = True
    return generate.main(argv)
