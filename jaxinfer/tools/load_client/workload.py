"""The jobs of a load: when each request is sent, its prompt, and its length.

One seed determines everything: two runs with the same options send the same requests at the same
times, regardless of the server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# Words that are one token each in the vocabularies in use, with the space before them.
COMMON = (
    "the of and to in is that it was for on are as with they at be this have from or one had by "
    "word but not what all were we when your can said there use an each which she do how their if "
    "will up other about out many then them these so some her would make like him into time has "
    "look two more write go see number no way could people my than first water been call who oil "
    "its now find long down day did get come made may part"
)
WORDS = COMMON.split()
FIRST_ORDINARY_ID = 100  # vocabularies keep special tokens below it


class WorkloadError(ValueError):
    """An option or a trace that describes no load; the message names it and a correct form."""


@dataclasses.dataclass(frozen=True)
class LoadJob:
    """One request to send, `at` seconds after the start, or as soon as a client is free (None)."""

    prompt: str | list[int]
    max_tokens: int
    at: float | None = None


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens.

    The form is `fixed:128`, `uniform:16:256` (both ends included) or `lognormal:64:1.0:8:512`
    (median, sigma of the logarithm, minimum and maximum, to which values are clipped).
    """

    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse a distribution; raises `WorkloadError` for other text and for lengths below 1."""
        kind, *fields = text.split(":")
        numbers: list[float] = []
        with contextlib.suppress(ValueError):
            numbers = [float(field) for field in fields]
        is_whole = {"fixed": 1, "uniform": 2, "lognormal": 4}.get(kind) == len(numbers)
        if not is_whole or not all(map(math.isfinite, numbers)) or min(numbers) < 0:
            is_sound = False
        else:
            bounds = numbers[-2:]
            is_sound = 1 <= bounds[0] <= bounds[-1] and numbers[0] > 0
        if not is_sound:
            raise WorkloadError(
                f"{text!r} is no distribution of lengths; write fixed:N, uniform:LEAST:MOST or "
                "lognormal:MEDIAN:SIGMA:LEAST:MOST, with lengths from 1"
            )
        return cls(kind, tuple(numbers))

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        if self.kind == "fixed":
            return [int(self.numbers[0])] * count
        if self.kind == "uniform":
            least, most = self.numbers
            return generator.integers(int(least), int(most) + 1, count).tolist()
        median, sigma, least, most = self.numbers
        lengths = np.exp(generator.normal(np.log(median), sigma, count))
        return lengths.clip(least, most).astype(int).tolist()


@dataclasses.dataclass(frozen=True)
class PromptMaker:
    """Makes prompts of a given length, all different, so that no prefix is found in a cache.

    Text consists of common words, about one token each; ids are drawn below `vocab_size`.
    """

    seed: int
    vocab_size: int | None = None  # None: text

    def make(self, index: int, length: int) -> str | list[int]:
        generator = np.random.default_rng([self.seed, 3, index])
        if self.vocab_size is not None:
            return generator.integers(FIRST_ORDINARY_ID, self.vocab_size, length).tolist()
        return " ".join(WORDS[i] for i in generator.integers(0, len(WORDS), length))


def poisson_times(rate: float, count: int, seed: int) -> list[float]:
    """The arrival times of `count` requests in seconds, `rate` a second on average."""
    gaps = np.random.default_rng([seed, 1]).exponential(1 / rate, count)
    return np.cumsum(gaps).tolist()


def make_jobs(
    prompts: PromptMaker,
    prompt_lens: Lengths,
    output_lens: Lengths,
    times: Sequence[float | None],
    seed: int,
) -> list[LoadJob]:
    """Make one job for each of `times`; `seed` determines the lengths."""
    generator = np.random.default_rng([seed, 2])
    inputs = prompt_lens.draw(generator, len(times))
    outputs = output_lens.draw(generator, len(times))
    return [
        LoadJob(prompts.make(i, n), m, at)
        for i, (n, m, at) in enumerate(zip(inputs, outputs, times, strict=True))
    ]


def read_trace(path: str | Path, prompts: PromptMaker) -> list[LoadJob]:
    """Read the jobs of a trace file, sorted by time.

    Each line is a JSON object with `at` in seconds, `max_tokens`, and either `prompt` (text or
    token ids) or `prompt_tokens` (a length, of which `prompts` makes the prompt). Raises
    `WorkloadError`, which names every wrong line.
    """
    jobs, problems = [], []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
        if line.strip():
            try:
                jobs.append(_traced(json.loads(line), prompts, number))
            except (ValueError, TypeError) as error:
                problems.append(f"{path}:{number}: {error}")
    if not jobs and not problems:
        problems = [f"{path}: no request in it"]
    if problems:
        raise WorkloadError("\n".join(problems))
    return sorted(jobs, key=lambda job: job.at or 0.0)


def _traced(entry: object, prompts: PromptMaker, number: int) -> LoadJob:
    if not isinstance(entry, dict):
        raise ValueError(f"{entry!r} is no JSON object")
    unknown = set(entry) - {"at", "max_tokens", "prompt", "prompt_tokens"}
    if unknown or ("prompt" in entry) == ("prompt_tokens" in entry):
        raise ValueError(
            f"fields {sorted(entry)}; needed are at, max_tokens, and prompt or prompt_tokens"
        )
    at, max_tokens = entry.get("at"), entry.get("max_tokens")
    if not isinstance(at, int | float) or isinstance(at, bool) or not 0 <= at < math.inf:
        raise ValueError(f"at is {at!r}; it must be a number of seconds from 0")
    if type(max_tokens) is not int or max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens!r}; it must be an integer from 1")
    if "prompt" in entry:
        prompt = entry["prompt"]
        is_ids = isinstance(prompt, list) and all(type(i) is int for i in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise ValueError(f"prompt is {prompt!r}; it must be a text or a list of token ids")
        return LoadJob(prompt, max_tokens, float(at))
    length = entry["prompt_tokens"]
    if type(length) is not int or length < 1:
        raise ValueError(f"prompt_tokens is {length!r}; it must be an integer from 1")
    return LoadJob(prompts.make(number, length), max_tokens, float(at))
