"""Says what an operator should know about who can reach the server."""

from __future__ import annotations

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


def exposure_warnings(config: ServerConfig) -> tuple[str, ...]:
    """Give what to warn of: nothing on loopback."""
    if is_loopback(config.host):
        return ()
    security = config.security
    encrypted, checks_tokens = security.tls_cert is not None, security.auth_tokens is not None
    authenticates = checks_tokens or security.tls_client_ca is not None
    reached = f"whoever reaches {config.host}"
    found = []
    if not authenticates:
        found.append(
            f"{reached} may use this server and its administration; set --auth-tokens or --tls-client-ca, or --host "
            "127.0.0.1"
        )
    if not encrypted:
        what = "prompts, answers and tokens" if checks_tokens else "prompts and answers"
        found.append(f"{what} cross the network in the clear; set --tls-cert and --tls-key, or see that a proxy does")
    if config.metrics_port is not None:
        found.append(f"{reached} may read the metrics: they need neither token nor certificate")
    return tuple(found)
