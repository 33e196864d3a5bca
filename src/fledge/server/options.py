"""The settings of the server, beside those of the engine; API keys."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from fledge.decoding.params import MAX_LOGPROBS
from fledge.errors import ConfigError
from fledge.server.errors import RequestError
from fledge.server.reasoning_parsers import reasoning_parser
from fledge.server.tool_parsers import tool_parser

CONTENT_FORMATS = ("auto", "string", "openai")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Settings of the server, under the names of `vllm serve` where it has them."""

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()  # for the endpoints under /admin; if empty, those are disabled
    chat_template: str | None = None  # the template's text; None: the tokenizer's own
    chat_template_name: str | None = None  # for metrics
    chat_template_content_format: str = "auto"  # "string", "openai" (a list of parts), or "auto": by the template
    response_role: str = "assistant"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_call_parser: str | None = None  # a name, "auto" or None
    reasoning_parser: str | None = None  # a name, "auto" or None
    disable_any_whitespace: bool = False  # in structured JSON
    allow_client_templates: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # allowed names in `Host`, beside those of localhost; if empty, any
    root_path: str = ""
    disable_fastapi_docs: bool = False
    max_logprobs: int = MAX_LOGPROBS
    return_tokens_as_token_ids: bool = False
    exclude_tools_when_tool_choice_none: bool = False  # from the prompt
    enable_force_include_usage: bool = False
    max_body_bytes: int = 2 * 2**20
    max_queue: int = 256
    request_timeout: float = 600.0  # seconds
    drain_timeout: float = 30.0
    default_sampling: dict[str, float | int] = field(default_factory=dict)  # the model's generation_config.json
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ConfigError("--served-model-name: at least one name is needed")
        if not 0 < self.request_timeout <= 86400:
            raise ConfigError(f"--request-timeout: found {self.request_timeout}, allowed is above 0 to 86400")
        if not 0 <= self.drain_timeout <= 86400:
            raise ConfigError(f"--drain-timeout: found {self.drain_timeout}, allowed is 0 to 86400")
        if not 1024 <= self.max_body_bytes <= 2**30:
            raise ConfigError(f"--max-body-bytes: found {self.max_body_bytes}, allowed is 1024 to {2**30}")
        if self.chat_template_content_format not in CONTENT_FORMATS:
            found, allowed = self.chat_template_content_format, ", ".join(CONTENT_FORMATS)
            raise ConfigError(f"--chat-template-content-format: found '{found}', allowed is {allowed}")
        if self.max_queue < 0:
            raise ConfigError(f"--max-queue: found {self.max_queue}, allowed is 0 or more")
        ApiKeys(self.api_keys)  # these four raise ConfigError for invalid values
        AdminKeys(self.admin_api_keys)
        tool_parser(self.tool_call_parser)
        reasoning_parser(self.reasoning_parser)

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]


class ApiKeys:
    """The keys of clients; if there are none, everybody is authorized. Only digests are kept."""

    OPTION = "--api-key"
    REASON = "this server needs an API key"

    def __init__(self, keys: Sequence[str]) -> None:
        if not all(key.strip() for key in keys):
            raise ConfigError(f"{self.OPTION}: a key must not be empty")
        self._digests = [_digest(key) for key in keys]

    def match(self, key: str) -> bool:
        """Whether it is one of the keys. All are compared, each in constant time, so timing reveals nothing."""
        return sum(hmac.compare_digest(digest, _digest(key)) for digest in self._digests) > 0

    async def check(self, request: Request) -> str:
        """Raise RequestError (401) unless the request has a valid key. Return the digest of the key."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if self._digests and (scheme.lower() != "bearer" or not self.match(key.strip())):
            message = f"{self.REASON}: send the header 'Authorization: Bearer KEY'"
            raise RequestError(message, status=401, code="invalid_api_key")
        return _digest(key.strip()).hex() if self._digests else ""


class AdminKeys(ApiKeys):
    """The keys for the endpoints under /admin; if there are none, nobody is authorized."""

    OPTION = "--admin-api-key"
    REASON = "this changes the server, for which it needs an admin key"

    async def check(self, request: Request) -> str:
        if not self._digests:
            message = "nobody may change this server while it runs; start it with --admin-api-key KEY"
            raise RequestError(f"{message}, or FLEDGE_ADMIN_API_KEY", status=403, code="no_admin_key")
        return await super().check(request)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
