"""How each `tokenizer.ggml.pre` name splits text before byte-level merges.

A GGUF file names its split rule instead of carrying it. The patterns are those of the models'
own `tokenizer.json` files; the names are those that GGUF converters write.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    rf"{_SPACES}"
)


@dataclass(frozen=True)
class SplitRule:
    """One way to split: `patterns` in turn, each isolating its matches within the pieces so far.

    `whole_words_first` takes a piece that is itself a token without trying merges; `adds_bos` is
    the default where the file does not say; `composes` normalizes to NFC first.
    """

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    adds_bos: bool = False
    composes: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The splits, then the byte alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composes else None


_PLAIN = SplitRule((_GPT2,))
_DIGITS = SplitRule((r"\p{N}", _GPT2))
_LLAMA_BPE = SplitRule((_LLAMA3,), whole_words_first=True, adds_bos=True)

SPLIT_RULES = {
    "default": SplitRule((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon": SplitRule((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "granite-docling"), _PLAIN
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA_BPE
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), SplitRule((_LLAMA3,))),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2"), SplitRule((_QWEN2,))
    ),
    "qwen2": SplitRule((_QWEN2,), composes=True),
    "qwen35": SplitRule((_QWEN35,), composes=True),
    "tekken": SplitRule((_TEKKEN,), whole_words_first=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), SplitRule((_GPT4O,))),
    "deepseek-coder": SplitRule(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-v3": SplitRule((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK3)),
}
