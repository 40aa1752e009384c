"""Texts that are difficult for tokenizers, and a small corpus to train tiny tokenizers on."""

from __future__ import annotations

import json

from tests.support.paths import REFERENCES

_TEXTS: dict[str, list[str]] = json.loads((REFERENCES / "difficult_texts.json").read_text("utf-8"))
_ORDINARY = (*_TEXTS["scripts"], *_TEXTS["emoji"], *_TEXTS["numbers"], *_TEXTS["code"])
LONG = (
    "a" * 10_000,
    "abcdefghij" * 1_000,
    "Donaudampfschifffahrtselektrizit\u00e4tenhauptbetriebswerkbauunterbeamtengesellschaft",
    "word " * 300,
    "!" * 500 + "?!" * 100 + "-" * 200,
    "\u4e2d" * 300 + "\u00e4" * 300 + "\U0001f600" * 100,
    "0" * 300 + "1234567890" * 20,
    " " * 100 + "x" + "\n" * 70 + "\t" * 50 + " \t\n" * 40,
    "\n".join(_ORDINARY),
)
DIFFICULT_TEXTS = (*(text for name in _TEXTS if name != "corpus" for text in _TEXTS[name]), *LONG)
# Enough for a few hundred merges or pieces that include the most common letters of every script.
CORPUS = (*_TEXTS["scripts"], *_TEXTS["code"], *_TEXTS["numbers"], *_TEXTS["corpus"])
