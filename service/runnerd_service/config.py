"""The service's configuration: built once by the CLI, validated, never changed. Knows no gRPC, no engine, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

AsyncExecution = Literal["auto", "required", "off"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine process needs. Units are in the names; None means "decide for me"."""

    runner: str = "cpu"
    model: str | None = None
    """Path of a model directory or GGUF file."""
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int | None = None
    memory_bytes: int | None = None
    memory_fraction: float = 0.9
    prefix_caching: bool = True
    priority_ageing_seconds: float = 10.0
    """Waiting time that raises a request's priority by one level; 0: it stays what it is."""
    async_execution: AsyncExecution = "auto"
    max_in_flight: int | None = None
    """Depth when asynchronous; None means 2, or what the runner allows. Only with async_execution other than "off"."""
    adaptive_depth: bool | None = None
    """Keep one step in flight where overlapping would gain next to nothing; None: where device and host share cores."""
    guide_cache_size: int = 64
    """Guides whose compiled form is kept, the latest ones."""
    trust_remote_code: bool = False
    enforce_eager: bool = False
    speculative_model: str | None = None
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    runner_options: Mapping[str, str] = field(default_factory=dict)
    """As given; converted against the runner's declared options."""


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may call, and how the connection is protected. Paths are of PEM files unless said otherwise."""

    tls_cert: str | None = None
    """The server's certificate and those between it and its root; None: no TLS."""
    tls_key: str | None = None
    tls_client_ca: str | None = None
    """Who signs the certificates that clients have to show; None: they show none."""
    tls_admins: tuple[str, ...] = ()
    """Names in clients' certificates whose holders may administrate."""
    auth_tokens: str | None = None
    """TOML file of bearer tokens; None: none is asked for."""
    tenant_metadata: str | None = None
    """Metadata key that names the tenant, where the token does not."""
    min_priority: int | None = None
    """Least value of a request's priority, of callers that are no administrators; None: any. Lower ones run first."""
    share_prefixes: bool = False
    """Whether tenants share cached prefixes; times and ``cached_tokens`` then tell each what others sent."""
    reflection: bool = True
    """Whether the services' description is served to callers."""

    @property
    def authenticates(self) -> bool:
        """Whether callers have to say who they are."""
        return self.auth_tokens is not None or self.tls_client_ca is not None


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """What one tenant may have at once; None: as much as there is."""

    max_running: int | None = None
    """Outputs that the engine has of it; further ones wait."""
    max_tokens: int | None = None
    """Prompt and output tokens that these may have together; one output may always run."""
    max_waiting: int | None = None
    """Outputs that may wait; further ones get RESOURCE_EXHAUSTED."""
    max_waiting_tokens: int | None = None
    """Prompt tokens that these may have together."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the front process needs."""

    host: str = "127.0.0.1"
    port: int = 50051
    """0 lets the system choose; the chosen one is printed."""
    unix_socket: str | None = None
    """Path; when set, it is served beside the port."""
    metrics_port: int | None = None
    """Port of the Prometheus metrics; None: they are not served. 0 lets the system choose."""
    metrics_host: str | None = None
    """Address that the metrics listen on; None: ``host``."""
    status_page: bool = True
    """Whether a page that shows the server's state is served beside the metrics."""
    otlp_traces_endpoint: str | None = None
    """URL of the collector that traces of requests are sent to; None: what the environment says, or no traces."""
    channelz: bool = False
    """Whether gRPC tells of its own channels and sockets."""
    served_model_name: str | None = None
    """None: the model's own name."""
    chat_template: str | None = None
    """Path of a Jinja file to use instead of the model's template."""
    request_templates: bool = True
    """Whether a request may bring a template of its own."""
    max_n: int = 64
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_bad_words: int = 1024
    max_logit_bias: int | None = None
    """Tokens of a request with a bias; None: as many as there are token ids."""
    max_guide_bytes: int = 256 * 1024
    """Largest guide of a request."""
    guide_timeout_seconds: float = 10.0
    """A guide that takes longer to compile is refused; 0: it may take any time."""
    max_message_bytes: int = 16 * 1024 * 1024
    max_waiting: int = 4096
    """Requests that may wait for a place; further ones get RESOURCE_EXHAUSTED."""
    max_waiting_tokens: int | None = None
    """Prompt tokens that the waiting requests may have together; None: as many as there are."""
    queue_timeout_seconds: float = 0.0
    """A request that has waited so long for a place gets RESOURCE_EXHAUSTED; 0: it may wait for any time."""
    deadline_check: bool = True
    """Whether a request is refused whose deadline passes before it can begin, by how fast others begin."""
    stall_timeout_seconds: float = 300.0
    """A stream whose reader takes nothing for so long is ended; 0: it may stall for any time."""
    drain_seconds: float = 30.0
    """How long live requests may go on after SIGTERM or SIGHUP."""
    max_engine_restarts: int = 5
    """Restarts of the engine in a row without progress, after which the server gives up; 0: at the first failure."""
    engine_restart_backoff_seconds: float = 1.0
    """Wait before the second restart in a row; doubles with each further one. The first is made at once."""
    step_timeout_seconds: float = 300.0
    """An engine with work that ends no step in this time hangs, and is restarted; 0: it may take any time."""
    max_metadata_bytes: int = 16 * 1024
    """Largest metadata of a call, what gRPC itself sends and 32 bytes an entry included."""
    security: SecurityConfig = field(default_factory=SecurityConfig)
    tenant: TenantConfig = field(default_factory=TenantConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
