"""Text: tokenizers, incremental detokenization, chat templates."""
