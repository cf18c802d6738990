"""When the server's certificate is valid, and the warnings of one that is not, or not for long."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

logger = logging.getLogger(__name__)

SOON = timedelta(days=14)
"""A certificate that ends within this time is warned of."""


@dataclass(frozen=True, slots=True)
class Validity:
    """The time in which clients take a certificate."""

    begins: datetime
    ends: datetime


def validity_of(chain: bytes) -> Validity | None:
    """Give the validity of the first certificate of a PEM file; None where the library is stricter than OpenSSL.

    Args:
        chain: That OpenSSL has read.
    """
    from cryptography import x509  # 60 ms, which servers without TLS and the other subcommands need not wait for

    try:
        certificate = x509.load_pem_x509_certificate(chain)
        return Validity(certificate.not_valid_before_utc, certificate.not_valid_after_utc)
    except (ValueError, x509.InvalidVersion):
        return None


def validity_problem(validity: Validity | None, now: datetime) -> str:
    """Give what is wrong with a certificate now, or soon; empty for nothing."""
    if validity is None:
        return "has an end that cannot be read, and no later warning will tell of it"
    if now > validity.ends:
        return f"has expired: it ended on {_date(validity.ends)}, and clients refuse it"
    if now < validity.begins:
        return f"is not valid yet: it begins on {_date(validity.begins)}, and clients refuse it until then"
    if now > validity.ends - SOON:
        return f"expires soon: it ends on {_date(validity.ends)}, and clients refuse it from then on"
    return ""


class ValidityLog:
    """Warns of a certificate whenever it is read, and when time makes it worse.

    Args:
        path: The certificate's file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._validity: Validity | None = None
        self._problem = ""

    def note(self, validity: Validity | None) -> None:
        """Warn of the certificate in use, if there is reason to that was not told.

        Args:
            validity: Of the certificate; another object whenever it was read again.
        """
        problem = validity_problem(validity, datetime.now(UTC))
        if validity is self._validity and problem == self._problem:
            return
        self._validity, self._problem = validity, problem
        if problem:
            logger.warning(
                "the certificate %s of --tls-cert %s; put another one and its key there, which needs no restart",
                self._path,
                problem,
            )


def _date(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"
