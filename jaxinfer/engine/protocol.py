"""What every engine offers: one `Engine`, several as `Replicas`, or an `Embedder`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxinfer.config import EngineConfig
from jaxinfer.engine.outputs import Update
from jaxinfer.engine.request import Request
from jaxinfer.engine.stats import EngineStats
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Engine


class EngineLike(Protocol):
    """An engine as the server, the command and `LLM` use it. One thread owns it; `check` alone may
    be called from any."""

    config: EngineConfig
    model: FunctionalModel
    name: str
    tokenizer: Tokenizer | None
    max_model_len: int

    @property
    def can_generate(self) -> bool:
        """Whether it generates tokens; otherwise it embeds texts."""
        ...

    @property
    def embedding_dim(self) -> int:
        """Numbers of a text's vector; 0 if it embeds none."""
        ...

    @property
    def replicas(self) -> tuple[Engine, ...]:
        """The engines with schedulers of their own that it is made of; none for an embedder."""
        ...

    @property
    def weights(self) -> Weights: ...

    @property
    def num_programs(self) -> int:
        """The number of programs that `warm_up` compiles."""
        ...

    @property
    def has_requests(self) -> bool:
        """Whether a further `step` will bring something."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        ...

    @property
    def stats(self) -> EngineStats:
        """An immutable snapshot."""
        ...

    def warm_up(self, on_progress: Callable[[str], None] = ...) -> None:
        """Compile every program; `on_progress` gets the name of each one."""
        ...

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams = ...,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[Request]:
        """Queue a prompt or a text. Raises `InvalidRequestError`, and then nothing has changed."""
        ...

    def check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, priority: int = 0
    ) -> Any:
        """Raise the `InvalidRequestError` that `add` would; nothing is queued."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request now. Returns False if it is unknown or has ended."""
        ...

    def step(self) -> list[Update]:
        """Run one step; return its updates, one for each request."""
        ...
