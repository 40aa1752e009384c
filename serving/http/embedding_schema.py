"""The body of a request to embed: OpenAI's fields, and fields of this server's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema

from jaxinfer.sampling.params import MAX_INT32
from jaxinfer.serving.http.request_schema import (
    MAX_ID_LEN,
    PROMPT_SCHEMA,
    Name,
    prompt_forms,
    strict,
)


class EmbeddingBody(BaseModel):
    """`input` has the forms of a prompt; see `LLM.embed` for the fields that OpenAI lacks."""

    model_config = strict()
    model: str | None = None
    input: Annotated[Any, PlainValidator(prompt_forms), WithJsonSchema(PROMPT_SCHEMA)]
    encoding_format: Literal["float", "base64"] | None = None  # float
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    user: Annotated[str, Field(max_length=MAX_ID_LEN)] | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    prompt_name: Annotated[str, Field(max_length=MAX_ID_LEN)] | None = None
    request_id: Name | None = None
    timeout_s: Annotated[float, Field(ge=0)] | None = None
