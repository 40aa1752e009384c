"""The rules that split text before byte-level merges, by their `tokenizer.ggml.pre` name.

A GGUF file contains the name of its split rule, not the rule. The patterns are those of the models'
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

# Most letters that have upper and lower case, as listed in DeepSeek-V2's file.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_WIDE = "[\u0800-\u9fa5\uac00-\ud7ff]+"
# Splits at these marks, which include Chinese, Hindi, Urdu and Arabic ones.
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True)
class SplitRule:
    """A split rule: each of the `patterns` in turn isolates its matches in the pieces so far.

    `whole_words_first` encodes a piece that is a token as such, without merges; `adds_bos` is the
    default for files that do not say; `uses_nfc` normalizes the text to NFC first.
    """

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    adds_bos: bool = False
    uses_nfc: bool = False

    def pre_tokenizer(self, *, add_prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
        """Return the splits, followed by the byte alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)]
        )

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return the normalizer, if the rule has one."""
        return normalizers.NFC() if self.uses_nfc else None


_PLAIN = SplitRule((_GPT2,))
_DIGITS = SplitRule((r"\p{N}", _GPT2))
_LLAMA_BPE = SplitRule((_LLAMA3,), whole_words_first=True, adds_bos=True)

SPLIT_RULES = {
    "default": SplitRule((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon": SplitRule((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "jais", "exaone4", "granite-docling", "roberta-bpe"),
            *("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code"),
            *("gigachat", "a.x-4.0", "mellum"),
        ),
        _PLAIN,
    ),
    **dict.fromkeys(("mpt", "olmo"), SplitRule((_GPT2,), uses_nfc=True)),  # GPT-NeoX's
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), SplitRule((_BLOOM,))),
    "viking": SplitRule((r"\p{N}", _BLOOM)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    **dict.fromkeys(
        (
            *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"),
            "midm-2.0",
        ),
        _LLAMA_BPE,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), SplitRule((_LLAMA3,))),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2", "kormo"),
        SplitRule((_QWEN2,)),
    ),
    **dict.fromkeys(("qwen2", "f2llmv2"), SplitRule((_QWEN2,), uses_nfc=True)),
    "qwen35": SplitRule((_QWEN35,), uses_nfc=True),
    "tekken": SplitRule((_TEKKEN,), whole_words_first=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), SplitRule((_GPT4O,))),
    "deepseek-llm": SplitRule(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _WIDE,
            r"\p{N}",
        )
    ),
    "deepseek-coder": SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _WIDE, r"\p{N}")),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense"),
        SplitRule((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK3)),
    ),
}
