"""Generate text from a prompt, a file of prompts, or a conversation: `jaxinfer generate`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
