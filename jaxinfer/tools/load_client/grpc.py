"""The load client for gRPC: `Generate` of `jaxinfer.v1.Inference`, timed as HTTP streams are."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import grpc

from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer.tools.load_client.http import Clock, RequestFailed
from jaxinfer.tools.load_client.record import Record
from jaxinfer.tools.load_client.workload import LoadJob, WorkloadError

METHOD = "/jaxinfer.v1.Inference/Generate"
# Each channel has its own connection, like many clients instead of one that multiplexes.
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]


class GrpcClient:
    """Sends jobs as `Generate` calls.

    `fields` are set in every message: names of `GenerateRequest` or of its `SamplingParams`.
    """

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        api_key: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ):
        self._address = address
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key is not None else []
        self._template = request_template(model, fields or {})
        self._channels = [self._channel()]
        self._next = itertools.count()

    async def open(self, count: int) -> None:
        """Open `count` connections in advance; calls use them round-robin."""
        self._channels += [self._channel() for _ in range(count - len(self._channels))]
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels))

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def send(
        self, job: LoadJob, record: Record, clock: Clock, fields: Mapping[str, Any] | None = None
    ) -> None:
        """Send a job and fill its record as the answer arrives; raises `RequestFailed`.

        `fields` are set in this message alone; `deadline_s` becomes the deadline of the call.
        Cancellation cancels the call.
        """
        fields = dict(fields or {})
        deadline_s = fields.pop("deadline_s", None)
        channel = self._channels[next(self._next) % len(self._channels)]
        method = channel.unary_stream(
            METHOD,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        message = request_message(self._template, job, fields)
        call = method(message, timeout=deadline_s, metadata=self._metadata)
        is_whole = False
        try:
            async for response in call:
                if response.sample.text:
                    record.times.append(clock())
                if response.HasField("finished"):
                    is_whole = True
                    record.prompt_tokens = response.finished.usage.prompt_tokens
                    record.output_tokens = response.finished.usage.output_tokens
            record.status = (await call.code()).name
        except grpc.aio.AioRpcError as error:
            record.status = error.code().name
            raise RequestFailed(record.status, (error.details() or "")[:300]) from error
        finally:
            call.cancel()  # no effect once it has ended
        if not is_whole:
            raise RequestFailed("incomplete", "the stream ended without its `finished`")

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._address, options=OPTIONS)


def request_template(model: str, fields: Mapping[str, Any]) -> pb.GenerateRequest:
    """The fields that all requests of a load share."""
    template = pb.GenerateRequest(model=model)
    _set_fields(template, fields)
    return template


def request_message(
    template: pb.GenerateRequest, job: LoadJob, fields: Mapping[str, Any]
) -> pb.GenerateRequest:
    """The message of a job's request."""
    message = pb.GenerateRequest()
    message.CopyFrom(template)
    if isinstance(job.prompt, str):
        message.text = job.prompt
    else:
        message.token_ids.ids.extend(job.prompt)
    message.params.max_tokens = job.max_tokens
    _set_fields(message, fields)
    return message


def _set_fields(message: pb.GenerateRequest, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        in_params = name in pb.SamplingParams.DESCRIPTOR.fields_by_name
        if not in_params and name not in pb.GenerateRequest.DESCRIPTOR.fields_by_name:
            raise WorkloadError(f"{name!r} is no field of GenerateRequest or SamplingParams")
        try:
            setattr(message.params if in_params else message, name, value)
        except (AttributeError, TypeError, ValueError) as error:
            raise WorkloadError(f"{name}={value!r}: {error}") from error
