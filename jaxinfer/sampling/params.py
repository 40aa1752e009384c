"""The sampling parameters of one request: a frozen, validated dataclass without array libraries.

The constructor of `SamplingParams` validates everything that is independent of the model; at
admission, `check` validates what depends on the vocabulary. Both raise one `SamplingParamsError`
that lists every problem with the field, its value and the limit. The `MAX_*` constants are also the
shapes of the per-slot device state in `jaxinfer.sampling.slots`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral, Real
from typing import no_type_check

MAX_LOGPROBS = 20  # top alternatives per token; the width of the step's logprob outputs
MAX_LOGIT_BIAS = 512  # (token, bias) pairs per request
MAX_BAD_WORDS = 32  # forbidden token sequences per request
MAX_BAD_WORD_LEN = 8  # tokens in one forbidden sequence
MAX_STOPS = 64  # stop strings per request
MAX_STOP_CHARS = 1024  # in all stop strings; the search automaton takes about 300 bytes for each
MAX_BAD_WORD_CHARS = 256  # in one word
MAX_ID_LIST = 262_144  # ids in one list; the size of the largest vocabularies
MAX_SAMPLES = 128  # completions of one prompt (n)
MAX_INT32 = 2**31 - 1
MAX_SEED = 2**32 - 1  # one 32-bit word is folded into the key
MAX_SCALE = 1e6  # temperature and repetition penalty stay in [1 / MAX_SCALE, MAX_SCALE]


class SamplingParamsError(ValueError):
    """All problems of a `SamplingParams`; `field` names the first invalid field."""

    def __init__(self, problems: Sequence[tuple[str, str]]):
        super().__init__(f"sampling parameters: {'; '.join(text for _, text in problems)}")
        self.field = problems[0][0]


class FrozenMapping(Mapping[int, float]):
    """An immutable, hashable, picklable mapping that equals any mapping with the same items."""

    __slots__ = ("_pairs",)

    def __init__(self, pairs: Iterable[tuple[int, float]] = ()):
        self._pairs = dict(pairs)

    def __getitem__(self, key: int) -> float:
        return self._pairs[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return hash(frozenset(self._pairs.items()))

    def __repr__(self) -> str:
        return repr(self._pairs)


@no_type_check  # tests check types at run time, but __post_init__ reports all wrong types at once
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The parameters that control a request's sampling, stopping conditions and logprobs.

    Collections are stored as tuples (`logit_bias` as a `FrozenMapping`) and numbers as plain int
    and float, so an object is hashable and safe to share between requests and threads. Raises
    `SamplingParamsError` with all problems of the object; wrong types, booleans in place of
    numbers, NaN and infinity are problems too.
    """

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0 or -1: off; values equal to the k-th largest are all kept
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off; relative to the most probable token
    seed: int | None = None  # None: the engine chooses one for the request
    presence_penalty: float = 0.0  # over output tokens
    frequency_penalty: float = 0.0  # over output tokens
    repetition_penalty: float = 1.0  # over prompt and output tokens; 1: off
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None  # None: all
    bad_words: Sequence[str] = ()  # texts whose token sequences are never completed
    min_tokens: int = 0  # no end-of-text or stop token before this many output tokens
    max_tokens: int | None = 256  # None: up to the context length; 0: no output token
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None  # None: off; 0: the chosen token; k: also the k likeliest
    prompt_logprobs: int | None = None

    def __post_init__(self):
        norm = _Normalizer(self)
        norm.real("temperature", 1 / MAX_SCALE, MAX_SCALE, also=0.0)
        norm.integer("top_k", -1, MAX_INT32)
        norm.real("top_p", 0.0, 1.0, above=True)
        norm.real("min_p", 0.0, 1.0)
        norm.integer("seed", 0, MAX_SEED, optional=True)
        norm.real("presence_penalty", -2.0, 2.0)
        norm.real("frequency_penalty", -2.0, 2.0)
        norm.real("repetition_penalty", 1 / MAX_SCALE, MAX_SCALE)
        norm.bias("logit_bias", -100.0, 100.0)
        norm.token_ids("allowed_token_ids", optional=True)
        norm.strings("bad_words", bare=False)
        norm.sizes("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS, of_each=True)
        norm.integer("min_tokens", 0, MAX_INT32)
        norm.integer("max_tokens", 0, MAX_INT32, optional=True)
        norm.strings("stop", bare=True)
        norm.sizes("stop", MAX_STOPS, MAX_STOP_CHARS, of_each=False)
        norm.token_ids("stop_token_ids", optional=False)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            norm.boolean(name)
        norm.integer("n", 1, MAX_SAMPLES)
        norm.integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        norm.integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        bounds_are_sound = not norm.problems.keys() & {"min_tokens", "max_tokens"}
        if bounds_are_sound and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            norm.refuse("min_tokens", f"at most max_tokens={self.max_tokens}")
        if norm.problems:
            raise SamplingParamsError(list(norm.problems.items()))

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is chosen, without a random number."""
        return self.temperature == 0.0

    def check(self, vocab_size: int, bad_word_ids: Sequence[Sequence[int]] = ()) -> None:
        """Check ids against the vocabulary, and sizes against the device state.

        `bad_word_ids` are the token sequences of `bad_words` (one word may have several). Raises
        `SamplingParamsError` listing every id out of range and every capacity exceeded.
        """
        problems: list[tuple[str, str]] = []
        groups = [
            ("logit_bias", self.logit_bias or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words", [i for ids in bad_word_ids for i in ids]),
        ]
        for name, ids in groups:
            wrong = [i for i in ids if not 0 <= i < vocab_size]
            if wrong:
                text = f"token ids {_shorten(wrong)} are outside the vocabulary [0, {vocab_size})"
                problems.append((name, f"{name}: {text}"))
        if len(self.logit_bias or ()) > MAX_LOGIT_BIAS:
            text = (
                f"logit_bias has {len(self.logit_bias or ())} entries; the limit is "
                f"{MAX_LOGIT_BIAS} (to permit a set of tokens, use allowed_token_ids)"
            )
            problems.append(("logit_bias", text))
        num_sequences = max(len(self.bad_words), len(bad_word_ids))
        if num_sequences > MAX_BAD_WORDS:
            text = f"bad_words needs {num_sequences} token sequences; the limit is {MAX_BAD_WORDS}"
            problems.append(("bad_words", text))
        for ids in bad_word_ids:
            if not 0 < len(ids) <= MAX_BAD_WORD_LEN:
                text = (
                    f"bad_words: a word is {len(ids)} tokens long ({_shorten(ids)}); "
                    f"it must be 1 to {MAX_BAD_WORD_LEN}"
                )
                problems.append(("bad_words", text))
        if problems:
            raise SamplingParamsError(problems)


class _Normalizer:
    """Validates the fields of one `SamplingParams`, stores their normal form, lists problems."""

    def __init__(self, params: SamplingParams):
        self.params = params
        self.problems: dict[str, str] = {}  # keyed by field

    def refuse(self, name: str, must: str) -> None:
        self.problems[name] = f"{name}={_shorten(getattr(self.params, name))} must be {must}"

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self.params, name, value)

    def real(
        self, name: str, low: float, high: float, *, above: bool = False, also: float | None = None
    ) -> None:
        """Accept a finite number in [low, high], in (low, high] if `above`, or exactly `also`."""
        value = _as_real(getattr(self.params, name))
        fits = value is not None and low <= value <= high and not (above and value == low)
        if value is None or not (fits or value == also):
            also_text = "" if also is None else f"{also:g}, or "
            self.refuse(name, f"{also_text}a number in {'(' if above else '['}{low:g}, {high:g}]")
        else:
            self._store(name, value)

    def integer(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self.params, name)
        if value is None and optional:
            return
        number = _as_int(value)
        if number is None or not low <= number <= high:
            self.refuse(name, f"{'None or ' if optional else ''}an integer in [{low}, {high}]")
        else:
            self._store(name, number)

    def boolean(self, name: str) -> None:
        if not isinstance(getattr(self.params, name), bool):
            self.refuse(name, "True or False")

    def strings(self, name: str, *, bare: bool) -> None:
        """Accept a sequence of non-empty strings or, if `bare`, a single string."""
        value = getattr(self.params, name)
        items = [value] if bare and isinstance(value, str) else _as_list(value)
        if items is None or not all(isinstance(item, str) and item for item in items):
            self.refuse(name, f"{'a string or ' if bare else ''}a sequence of non-empty strings")
        else:
            self._store(name, tuple(items))

    def sizes(self, name: str, max_count: int, max_chars: int, *, of_each: bool) -> None:
        """Limit the number of strings and their length: of each string, or of all together."""
        if name in self.problems:
            return
        lengths = [len(text) for text in getattr(self.params, name)]
        num_chars = max(lengths, default=0) if of_each else sum(lengths)
        if len(lengths) > max_count or num_chars > max_chars:
            each = "each of" if of_each else "in all"
            self.refuse(
                name,
                f"at most {max_count} strings, {each} at most {max_chars} characters; there are "
                f"{len(lengths)}, with {num_chars}",
            )

    def token_ids(self, name: str, *, optional: bool) -> None:
        """Accept ids >= 0 (`check` compares them with the vocabulary).

        An optional field may be None, but not empty.
        """
        value = getattr(self.params, name)
        if value is None and optional:
            return
        if isinstance(value, Sized) and len(value) > MAX_ID_LIST:
            self.refuse(name, f"at most {MAX_ID_LIST} token ids; there are {len(value)}")
            return
        items = _as_list(value)
        ids = [_as_int(item) for item in items or ()]
        sound = [i for i in ids if i is not None and 0 <= i <= MAX_INT32]
        if items is None or len(sound) < len(ids) or (optional and not ids):
            kind = "None or a non-empty sequence" if optional else "a sequence"
            self.refuse(name, f"{kind} of token ids (integers >= 0)")
        else:
            self._store(name, tuple(sound))

    def bias(self, name: str, low: float, high: float) -> None:
        value = getattr(self.params, name)
        if value is None:
            return
        pairs: dict[int, float] = {}
        for key, bias in value.items() if isinstance(value, Mapping) else ():
            token, number = _as_int(key), _as_real(bias)
            if token is not None and 0 <= token <= MAX_INT32 and number is not None:
                pairs[token] = number
        sound = isinstance(value, Mapping) and len(pairs) == len(value)
        if not sound or not all(low <= number <= high for number in pairs.values()):
            self.refuse(
                name, f"None or a mapping of token ids (>= 0) to numbers in [{low:g}, {high:g}]"
            )
        else:
            self._store(name, FrozenMapping(pairs.items()))


def _as_real(value: object) -> float | None:
    """Return a finite float, or None for any other value, including booleans."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _as_int(value: object) -> int | None:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def _as_list(value: object) -> list | None:
    """Return the items of an iterable; None for text, mappings and values of other types."""
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        return None
    return list(value)


def _shorten(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
