"""Says what an operator should know about who can reach the server."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

from runnerd_service.config import ServerConfig, TenantConfig
from runnerd_service.errors import ConfigurationError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``; a name other than localhost counts as reached by others."""
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_tenants(config: ServerConfig) -> None:
    """Check that limits of tenants can limit somebody.

    Raises:
        ConfigurationError: No call can have a tenant.
    """
    security = config.security
    if config.tenant != TenantConfig() and not (security.authenticates or security.tenant_metadata):
        raise ConfigurationError(
            "there are limits of tenants, but no call has a tenant; set --auth-tokens, --tls-client-ca or "
            "--tenant-metadata, or leave out --tenant-max-…"
        )


def check_metrics(config: ServerConfig) -> None:
    """Check that an address of the metrics has a port.

    Raises:
        ConfigurationError: It has none, so that nothing would listen there.
    """
    if config.metrics_host is not None and config.metrics_port is None:
        raise ConfigurationError(
            f"--metrics-host {config.metrics_host} serves nothing without a port; give --metrics-port, too (0 takes a "
            "free one), or leave out --metrics-host"
        )


def exposure_warnings(config: ServerConfig) -> tuple[str, ...]:
    """Give what to warn of: nothing on loopback."""
    return (*_warnings_of_calls(config), *_warnings_of_metrics(config))


def _warnings_of_calls(config: ServerConfig) -> Iterator[str]:
    if is_loopback(config.host):
        return
    security = config.security
    encrypted, checks_tokens = security.tls_cert is not None, security.auth_tokens is not None
    authenticates = checks_tokens or security.tls_client_ca is not None
    if not authenticates:
        yield (
            f"whoever reaches {config.host} may use this server and its administration; set --auth-tokens or "
            "--tls-client-ca, or --host 127.0.0.1"
        )
    if not encrypted:
        what = "prompts, answers and tokens" if checks_tokens else "prompts and answers"
        yield f"{what} cross the network in the clear; set --tls-cert and --tls-key, or see that a proxy does"


def _warnings_of_metrics(config: ServerConfig) -> Iterator[str]:
    host = config.metrics_host or config.host
    if config.metrics_port is not None and not is_loopback(host):
        yield (
            f"whoever reaches {host} may read the metrics: they need neither token nor certificate; set --metrics-host "
            "to an address that only those who may know reach"
        )
