"""The table of the settings of ``runnerd serve``: names, whose fields they fill, how a text is checked, help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runnerd_service.cli.values import (
    boolean,
    byte_size,
    count,
    integer,
    message_size,
    metadata_key,
    metadata_size,
    names,
    one_of,
    seconds,
    share,
    text,
    url,
)
from runnerd_service.telemetry.logs import LogFormat

ENVIRONMENT_PREFIX = "RUNNERD_"
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
MAX_NUM_SEQS = 65_536
"""Each is a slot, whose tables are made at the start."""
MAX_OUTPUTS = 65_536
LOG_LEVELS = ("debug", "info", "warning", "error")

Owner = Literal["engine", "server", "security", "tenant", "process"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. Its flag is ``--name``, its file key ``name``, its variable ``RUNNERD_NAME``."""

    name: str
    owner: Owner
    """Whose field it fills: EngineConfig's, ServerConfig's, SecurityConfig's, TenantConfig's, or none of theirs."""
    parse: Callable[[str], object]
    """Checks a text and gives its value; raises ValueError that says what was expected."""
    help: str
    metavar: str = ""
    """Empty for a switch."""
    field_name: str = ""
    """Name of the field where it differs from the setting's."""

    @property
    def attribute(self) -> str:
        """Name of the field it fills."""
        return self.field_name or self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Name of its environment variable."""
        return variable_of(self.name)


def variable_of(name: str) -> str:
    """Give the name of a setting's environment variable."""
    return ENVIRONMENT_PREFIX + name.replace("-", "_").upper()


SETTINGS: tuple[Setting, ...] = (
    Setting("model", "engine", text, "path of a model directory or GGUF file", "MODEL"),
    Setting("runner", "engine", text, "what computes the tokens; see `runnerd runners`", "NAME"),
    Setting("dtype", "engine", text, "data type of weights and activations, or auto", "DTYPE"),
    Setting("max-model-len", "engine", count(2), "most tokens of a request, prompt and output", "N"),
    Setting("max-num-seqs", "engine", count(1, MAX_NUM_SEQS), "requests that run at once", "N"),
    Setting("max-num-batched-tokens", "engine", count(1), "most tokens in one step", "N"),
    Setting("block-size", "engine", count(1), "tokens in a KV block", "N"),
    Setting("kv-cache-memory-bytes", "engine", byte_size, "size of the KV cache: 512MiB, 2GiB", "SIZE", "memory_bytes"),
    Setting(
        "memory-utilization",
        "engine",
        share,
        "share of the device's free memory that weights, activations and KV cache may use",
        "SHARE",
        "memory_fraction",
    ),
    Setting("prefix-caching", "engine", boolean, "reuse the KV blocks of equal prompt beginnings"),
    Setting(
        "priority-ageing",
        "engine",
        seconds,
        "waiting time that raises a request's priority by one level, so that nobody waits for ever; 0: it stays",
        "SECONDS",
        "priority_ageing_seconds",
    ),
    Setting(
        "async-execution",
        "engine",
        one_of("auto", "required", "off"),
        "overlap steps: auto falls back to synchronous with a warning, required refuses to start instead",
        "auto|required|off",
    ),
    Setting("max-in-flight", "engine", count(1), "steps that may be unresolved at once", "N"),
    Setting(
        "adaptive-depth",
        "engine",
        boolean,
        "keep one step in flight where overlapping gains next to nothing (default: where device and host share cores)",
    ),
    Setting("guide-cache-size", "engine", count(0), "guides whose compiled form is kept, the latest ones", "N"),
    Setting("trust-remote-code", "engine", boolean, "run code that comes with the model"),
    Setting("enforce-eager", "engine", boolean, "use no compiled or captured graphs"),
    Setting("speculative-model", "engine", text, "draft model of speculative decoding", "MODEL"),
    Setting("pipeline-parallel-size", "engine", count(1), "devices in a pipeline", "N"),
    Setting("tensor-parallel-size", "engine", count(1), "devices that share each layer", "N"),
    Setting("host", "server", text, "address to listen on", "HOST"),
    Setting("port", "server", count(0, 65535), "TCP port; 0 takes a free one and prints it", "PORT"),
    Setting("unix-socket", "server", text, "path of a unix socket to serve beside the port, mode 0600", "PATH"),
    Setting(
        "metrics-port",
        "server",
        count(0, 65535),
        "port of the Prometheus metrics; 0 takes a free one and logs it (default: no metrics)",
        "PORT",
    ),
    Setting(
        "metrics-host",
        "server",
        text,
        "address that the metrics listen on, with --metrics-port (default: that of --host)",
        "HOST",
    ),
    Setting("status-page", "server", boolean, "serve a page that shows the server's state beside the metrics"),
    Setting(
        "otlp-traces-endpoint",
        "server",
        url,
        "URL of a collector (OTLP over gRPC) that traces of requests are sent to; needs 'runnerd[otel]' "
        "(default: what OTEL_EXPORTER_OTLP_ENDPOINT says, or no traces)",
        "URL",
    ),
    Setting("channelz", "server", boolean, "serve gRPC's view of its connections; needs 'runnerd[channelz]'"),
    Setting("served-model-name", "server", text, "name of the model in requests and answers", "NAME"),
    Setting("chat-template", "server", text, "path of a Jinja file to use instead of the model's template", "PATH"),
    Setting("request-templates", "server", boolean, "take chat templates from requests, and run them apart"),
    Setting("max-n", "server", count(1, MAX_OUTPUTS), "most outputs of a request", "N"),
    Setting("max-logprobs", "server", count(0), "most alternatives per token that a request may ask for", "N"),
    Setting("max-stop-strings", "server", count(0), "most stop strings of a request", "N"),
    Setting("max-bad-words", "server", count(0), "most bad words of a request", "N"),
    Setting("max-logit-bias", "server", count(0), "most tokens of a request with a bias (default: as there are)", "N"),
    Setting("max-guide-bytes", "server", message_size, "largest guide of guided decoding: 256KiB", "SIZE"),
    Setting(
        "guide-timeout",
        "server",
        seconds,
        "a guide that takes longer to compile is refused; 0: it may take any time",
        "SECONDS",
        "guide_timeout_seconds",
    ),
    Setting("max-message-bytes", "server", message_size, "largest request message: 16MiB", "SIZE"),
    Setting("max-waiting", "server", count(0), "requests that may wait; further ones get RESOURCE_EXHAUSTED", "N"),
    Setting(
        "max-waiting-tokens",
        "server",
        count(1),
        "prompt tokens that waiting requests may have together; others get RESOURCE_EXHAUSTED (default: no limit)",
        "N",
    ),
    Setting(
        "queue-timeout",
        "server",
        seconds,
        "how long a request may wait for a place, then it gets RESOURCE_EXHAUSTED; 0: for any time",
        "SECONDS",
        "queue_timeout_seconds",
    ),
    Setting(
        "deadline-check",
        "server",
        boolean,
        "refuse a request at once whose deadline passes before it can begin, by how fast those that wait begin",
    ),
    Setting(
        "stall-timeout",
        "server",
        seconds,
        "a stream whose reader takes nothing for so long is ended; 0: it may stall for any time",
        "SECONDS",
        "stall_timeout_seconds",
    ),
    Setting("drain-seconds", "server", seconds, "how long live requests may go on after SIGTERM or SIGHUP", "SECONDS"),
    Setting(
        "max-engine-restarts",
        "server",
        count(0),
        "restarts of a failed engine in a row without progress, after which the server ends",
        "N",
    ),
    Setting(
        "engine-restart-backoff",
        "server",
        seconds,
        "wait before the second restart in a row, doubled for each further one up to 30 s; the first is made at once",
        "SECONDS",
        "engine_restart_backoff_seconds",
    ),
    Setting(
        "step-timeout",
        "server",
        seconds,
        "an engine with work that ends no step in this time hangs and is restarted; 0: it may take any time",
        "SECONDS",
        "step_timeout_seconds",
    ),
    Setting("max-metadata-bytes", "server", metadata_size, "largest metadata of a call: 16KiB", "SIZE"),
    Setting("tls-cert", "security", text, "PEM file of the server's certificate; turns TLS on for the port", "PATH"),
    Setting("tls-key", "security", text, "PEM file of the certificate's key", "PATH"),
    Setting(
        "tls-client-ca",
        "security",
        text,
        "PEM file of certificates; clients have to show one that these have signed (mutual TLS)",
        "PATH",
    ),
    Setting(
        "tls-admins",
        "security",
        names,
        "names in clients' certificates that may administrate, with commas between them (default: none)",
        "NAMES",
    ),
    Setting(
        "auth-tokens",
        "security",
        text,
        "TOML file of bearer tokens; calls then need one (see docs/security.md)",
        "PATH",
    ),
    Setting(
        "tenant-metadata",
        "security",
        metadata_key,
        "metadata key that names the tenant, where the token leaves that open (default: none)",
        "KEY",
    ),
    Setting(
        "min-priority",
        "security",
        integer,
        "least value of a request's priority, for callers that are no administrators (default: any)",
        "N",
    ),
    Setting(
        "share-prefixes",
        "security",
        boolean,
        "let tenants share cached prefixes; times and cached_tokens then tell each what others sent",
    ),
    Setting("reflection", "security", boolean, "serve the description of the services to callers"),
    Setting(
        "tenant-max-running",
        "tenant",
        count(1),
        "outputs that a tenant may have in the engine; further ones wait (default: no limit)",
        "N",
        "max_running",
    ),
    Setting(
        "tenant-max-tokens",
        "tenant",
        count(1),
        "prompt and output tokens that these may have together; further ones wait (default: no limit)",
        "N",
        "max_tokens",
    ),
    Setting(
        "tenant-max-waiting",
        "tenant",
        count(0),
        "requests of a tenant that may wait; further ones get RESOURCE_EXHAUSTED (default: no limit)",
        "N",
        "max_waiting",
    ),
    Setting(
        "tenant-max-waiting-tokens",
        "tenant",
        count(1),
        "prompt tokens that a tenant's waiting requests may have together (default: no limit)",
        "N",
        "max_waiting_tokens",
    ),
    Setting("log-level", "process", one_of(*LOG_LEVELS), "least level of log lines (default: info)", "LEVEL"),
    Setting("log-format", "process", one_of(*LOG_FORMATS), "log lines as text or as JSON (default: text)", "text|json"),
)
"""All but ``runner-option``, which has many values."""
