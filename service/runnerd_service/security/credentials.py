"""What the server knows callers by, and they it: the files of TLS and of tokens, read again when they change."""

from __future__ import annotations

import asyncio
from pathlib import Path

from runnerd_service.config import SecurityConfig
from runnerd_service.metrics import CredentialFigures
from runnerd_service.security.certificates import Certificates, certificate_paths, load_certificates
from runnerd_service.security.reloading import LOOK_SECONDS, Reloading
from runnerd_service.security.tokens import TokenTable, load_tokens
from runnerd_service.security.validity import ValidityLog


class Credentials:
    """The files that the configuration names.

    Args:
        config: Names them.

    Raises:
        ConfigurationError: One cannot be used.
    """

    def __init__(self, config: SecurityConfig) -> None:
        self.certificates: Reloading[Certificates] | None = None
        """None: no TLS."""
        self.tokens: Reloading[TokenTable] | None = None
        """None: none are asked for."""
        paths = certificate_paths(config)
        if paths:
            self.certificates = Reloading("the certificates of TLS", paths, lambda: load_certificates(config))
            self._validity_log = ValidityLog(paths[0])
        if config.auth_tokens is not None:
            path = Path(config.auth_tokens)
            self.tokens = Reloading(f"the file of tokens {path}", [path], lambda: load_tokens(path))

    def look(self) -> None:
        """Read the files that have changed, and warn of a certificate that is not valid, or not for long."""
        if self.tokens is not None:
            self.tokens.look()
        if self.certificates is not None:
            self.certificates.look()
            self._validity_log.note(self.certificates.get().validity)

    async def watch(self) -> None:
        """Look once a second, for ever; end at once where there are no files."""
        while self.certificates is not None or self.tokens is not None:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.look)  # files on another machine may take their time

    def figures(self) -> CredentialFigures:
        """Give the figures as they are now; may be called from any thread."""
        validity = None if self.certificates is None else self.certificates.get().validity
        files = {"tls": self.certificates, "tokens": self.tokens}
        return CredentialFigures(
            certificate_expiry_seconds=None if validity is None else validity.ends.timestamp(),
            reloads={name: file.figures() for name, file in files.items() if file is not None},
        )
