"""Who calls, and whether they may: bearer tokens, clients' certificates, roles. Stands before all other interceptors.

A call without a good token is refused before its message is read. Health is for everybody; what is not listed here is
for administrators.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc

from runnerd_service.config import SecurityConfig
from runnerd_service.errors import FieldViolation, InvalidRequest, PermissionDenied, RunnerdError, Unauthenticated
from runnerd_service.rpc.interceptor import abort
from runnerd_service.rpc.status import reason_of
from runnerd_service.security.reloading import Reloading
from runnerd_service.security.tokens import ANY_TENANT, NAME_RULE, Token, TokenTable, is_name
from runnerd_service.telemetry.requests import RequestStats

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # not a class that takes parameters at run time
_Metadata = Iterable[tuple[str, str | bytes]]

FOR_EVERYBODY = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
FOR_USERS = frozenset(
    {
        "/runnerd.v1.InferenceService/Generate",
        "/runnerd.v1.InferenceService/StreamGenerate",
        "/runnerd.v1.InferenceService/Abort",
        "/runnerd.v1.InferenceService/Tokenize",
        "/runnerd.v1.InferenceService/Detokenize",
        "/runnerd.v1.ModelService/GetModelInfo",
        "/runnerd.v1.ServerService/GetServerInfo",
        "/runnerd.v1.ServerService/GetLoad",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
)
"""All others are for administrators, those that come with later releases included."""

GENERATIONS = frozenset(method for method in FOR_USERS if method.endswith("Generate"))

_REFUSALS = tuple(reason_of(error).lower() for error in (Unauthenticated(), PermissionDenied(), InvalidRequest()))
_TLS_OF_UNIX = "unix:"
_LOG_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call."""

    name: str = ""
    """Of the token, or in the certificate; empty on a server that asks for neither."""
    tenant: str = ""
    """Whose limits count; empty for none."""
    is_admin: bool = True
    min_priority: int | None = None
    """Least value that it may ask for; None: any."""


CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 - it is frozen
"""Who makes the call that the present task handles."""


class Access:
    """Knows callers by what their calls bring.

    Args:
        config: What callers have to bring.
        tokens: Those that are known; None: none is asked for.
    """

    def __init__(self, config: SecurityConfig, tokens: Reloading[TokenTable] | None) -> None:
        self._config = config
        self._tokens = tokens

    def token(self, metadata: _Metadata) -> Token | None:
        """Give the token that the metadata holds; None where none is asked for.

        Raises:
            Unauthenticated: There is none, or it is not known.
        """
        if self._tokens is None:
            return None
        token = self._tokens.get().find(_bearer(metadata))
        if token is None:
            raise Unauthenticated("the bearer token is not known here")
        return token

    def check_role(self, method: str, name: str, *, is_admin: bool) -> None:
        """Check that whoever is called ``name`` may call ``method``.

        Raises:
            PermissionDenied: That is for administrators.
        """
        if not is_admin and method not in FOR_USERS:
            raise PermissionDenied(f"{name} is no administrator and may not call {_printable(method)}")

    def caller(self, method: str, token: Token | None, context: _Context) -> Caller:
        """Give who calls.

        Args:
            method: What is called.
            token: As :meth:`token` gave it.
            context: Of the call.

        Raises:
            Unauthenticated: The certificate names nobody.
            PermissionDenied: The certificate's holder may not call ``method``.
            InvalidRequest: The metadata names no tenant that may be one.
        """
        metadata = context.invocation_metadata() or ()
        if token is not None:
            tenant = token.tenant
            if tenant == ANY_TENANT:
                # Who names no tenant is one by the token's name: nobody is without limits.
                tenant = self._metadata_tenant(metadata) or token.name
            return self._caller(token.name, tenant, is_admin=token.role == "admin")
        if self._config.tls_client_ca is None or context.peer().startswith(_TLS_OF_UNIX):
            # Nobody is asked, or it is the owner of the server: no one else can open its socket.
            return Caller(tenant=self._metadata_tenant(metadata), min_priority=self._config.min_priority)
        name = _certificate_name(context.auth_context())
        is_admin = name in self._config.tls_admins
        self.check_role(method, name, is_admin=is_admin)
        return self._caller(name, self._metadata_tenant(metadata) or name, is_admin=is_admin)

    def _caller(self, name: str, tenant: str, *, is_admin: bool) -> Caller:
        return Caller(name, tenant, is_admin, None if is_admin else self._config.min_priority)

    def _metadata_tenant(self, metadata: _Metadata) -> str:
        key = self._config.tenant_metadata
        if key is None:
            return ""
        found = [value for name, value in metadata if name == key]
        if not found:
            return ""
        if len(found) > 1 or not isinstance(found[0], str) or not is_name(found[0]):
            raise InvalidRequest(FieldViolation(f"metadata {key}", f"got no name of a tenant, expected {NAME_RULE}"))
        return found[0]


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Lets callers through to what they may call; inside, :data:`CALLER` says who they are.

    Args:
        access: Knows them.
        stats: Is told of those that are not let through.
    """

    def __init__(self, access: Access, stats: RequestStats) -> None:
        self._access = access
        self._stats = stats
        self._log = _RefusalLog()
        stats.expect(refusals=_REFUSALS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Give the method's handler for those who may call it, and a refusal for others."""
        method = handler_call_details.method
        if method in FOR_EVERYBODY:
            return await continuation(handler_call_details)
        try:
            token = self._access.token(cast(_Metadata, handler_call_details.invocation_metadata or ()))
            handler = await continuation(handler_call_details)
            if handler is None:  # no such method: clients try the reflection of later releases first
                return None
            if token is not None:
                self._access.check_role(method, token.name, is_admin=token.role == "admin")
        except RunnerdError as error:
            return self._refusal(method, error)
        return self._guarded(method, token, handler)

    def _refusal(self, method: str, error: RunnerdError) -> _Handler:
        async def refuse(requests: object, context: _Context) -> None:
            self._note(method, error, context)
            await abort(method, error, context)

        # Of the kind that reads its messages itself: this one reads none, whatever the client sends.
        return grpc.stream_unary_rpc_method_handler(cast(Any, refuse))

    def _note(self, method: str, error: RunnerdError, context: _Context) -> None:
        self._stats.call_refused(reason_of(error).lower(), is_generation=method in GENERATIONS)
        self._log.note(method, context.peer(), error)

    def _guarded(self, method: str, token: Token | None, handler: _Handler) -> _Handler:
        async def enter(context: _Context) -> None:
            try:
                caller = self._access.caller(method, token, context)
            except RunnerdError as error:
                self._note(method, error, context)
                await abort(method, error, context)
                raise
            if method not in FOR_USERS and caller.name:
                logger.info("%s by %s", method, caller.name)
            CALLER.set(caller)

        codec = (handler.request_deserializer, handler.response_serializer)
        # The handlers behind are coroutines, but for those that read a stream of messages: they are generators.
        inner = cast(Any, handler.unary_unary or handler.unary_stream or handler.stream_stream)

        async def call(request: Any, context: _Context) -> Any:
            try:
                await enter(context)
                return await inner(request, context)
            except grpc.aio.AbortError as error:
                # It refers to the frames that it passes, and they to the context, which keeps the error: without this,
                # only a collection of garbage would free them all.
                raise error.with_traceback(None) from None
            finally:
                del context

        async def generate(requests: Any, context: _Context) -> Any:
            await enter(context)
            async for message in inner(requests, context):
                yield message

        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(cast(Any, call), *codec)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(cast(Any, call), *codec)
        assert inspect.isasyncgenfunction(inner), f"{method} has a handler of a kind that no service here has"
        return grpc.stream_stream_rpc_method_handler(cast(Any, generate), *codec)


class _RefusalLog:
    """Tells of refused calls, at most once a second: whoever is refused can call without end."""

    def __init__(self) -> None:
        self._next = 0.0
        self._num_untold = 0

    def note(self, method: str, peer: str, error: RunnerdError) -> None:
        now = time.monotonic()
        if now < self._next:
            self._num_untold += 1
            return
        untold = f" ({self._num_untold} further refusals before)" if self._num_untold else ""
        logger.warning("refused %s from %s: %s%s", _printable(method), peer, error, untold)
        self._next, self._num_untold = now + _LOG_SECONDS, 0


def _bearer(metadata: _Metadata) -> str:
    """Give the text of the bearer token.

    Raises:
        Unauthenticated: There is none, or more than one.
    """
    found = [value for key, value in metadata if key == "authorization"]
    expected = "expected the metadata 'authorization: Bearer TOKEN' (subcommands: --token-file or RUNNERD_TOKEN)"
    if len(found) != 1:
        raise Unauthenticated(f"got {len(found)} values of the metadata authorization; {expected}, once")
    scheme, _, text = found[0].partition(" ") if isinstance(found[0], str) else ("", "", "")
    if scheme.lower() != "bearer" or not text.strip():
        raise Unauthenticated(f"got another kind of authorization; {expected}")
    return text.strip()


def _certificate_name(auth_context: Any) -> str:
    """Give whom the client's certificate names: its common name, else its first alternative name.

    Raises:
        Unauthenticated: Neither can be a name here.
    """
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for value in auth_context.get(key, ()):
            text = value.decode(errors="replace")
            if is_name(text):
                return str(text)
    raise Unauthenticated(f"the client's certificate has no common or alternative name that is {NAME_RULE}")


def _printable(method: str) -> str:
    return ascii(method[:128])[1:-1]
