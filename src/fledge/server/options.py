"""The settings of a service, beside those of its engine."""

from dataclasses import dataclass, field

from fledge.errors import ConfigError
from fledge.server.limits import Limits


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How a service behaves. Names as in `vllm serve` where it has the same."""

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None  # the template's text; None: the tokenizer's own
    chat_template_name: str | None = None  # for metrics
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None  # a name, "auto" or None
    reasoning_parser: str | None = None  # a name, "auto" or None
    allow_client_templates: bool = False
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""
    max_queue: int = 256
    request_timeout: float = 600.0  # seconds
    drain_timeout: float = 30.0
    default_sampling: dict[str, float | int] = field(default_factory=dict)  # the model's generation_config.json
    seed: int = 0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ConfigError("--served-model-name: at least one name is needed")
        for name in ("request_timeout", "drain_timeout"):
            if not 0 < getattr(self, name) <= 86400:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: found {getattr(self, name)}, allowed is above 0 to 86400"
                )
        if self.max_queue < 0:
            raise ConfigError(f"--max-queue: found {self.max_queue}, allowed is 0 or more")

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]
