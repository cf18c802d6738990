"""The Python client of runnerd.

The answers are the messages of ``protos/runnerd/v1``; options are keyword arguments named like the request's fields.
"""

from runnerd.v1.generation_pb2 import (
    ChatMessage,
    ChatPrompt,
    Finish,
    FinishReason,
    GuidedDecoding,
    Token,
    Usage,
)
from runnerd.v1.inference_pb2 import GenerateResponse, OutputChunk, StreamGenerateResponse
from runnerd_client import guides
from runnerd_client.aio import AsyncClient, AsyncGenerationStream
from runnerd_client.channel import DEFAULT_ADDRESS, Tls
from runnerd_client.client import Client, GenerationStream
from runnerd_client.errors import (
    CONNECTION_LOST,
    AlreadyExistsError,
    DeadlineError,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RequestCancelledError,
    RunnerdError,
    UnauthenticatedError,
    UnavailableError,
)
from runnerd_client.requests import ChatTurn, Conversation, GenerateOptions, Prompt, chat
from runnerd_client.text import to_dict

__all__ = [
    "CONNECTION_LOST",
    "DEFAULT_ADDRESS",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncGenerationStream",
    "ChatMessage",
    "ChatPrompt",
    "ChatTurn",
    "Client",
    "Conversation",
    "DeadlineError",
    "FieldViolation",
    "Finish",
    "FinishReason",
    "GenerateOptions",
    "GenerateResponse",
    "GenerationStream",
    "GuidedDecoding",
    "InternalError",
    "InvalidRequestError",
    "NotFoundError",
    "OutputChunk",
    "OverloadedError",
    "PermissionDeniedError",
    "Prompt",
    "RequestCancelledError",
    "RunnerdError",
    "StreamGenerateResponse",
    "Tls",
    "Token",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "chat",
    "guides",
    "to_dict",
]
