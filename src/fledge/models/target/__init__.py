"""The target models. Adding a family means one file that declares a `FAMILY`, and one line here."""

from fledge.models.target import llama, mistral, qwen2, qwen3
from fledge.models.target.family import Family

FAMILIES: dict[str, Family] = {family.FAMILY.name: family.FAMILY for family in (llama, mistral, qwen2, qwen3)}
