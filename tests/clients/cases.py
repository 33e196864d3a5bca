"""What every client asks: one question, one tool, one form to fill in. The same greedy answer is expected of all."""

from typing import Any, Literal

from pydantic import BaseModel, Field

HELLO: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 24}
UNITS = ("celsius", "fahrenheit")
# Arguments that a small model cannot spin out: every value is one of a few.
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "unit": {"type": "string", "enum": list(UNITS)},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """A city, as far as it can be told in a few words."""

    name: Literal["Paris", "Rome", "Berlin"]
    is_capital: bool
    rank: int = Field(ge=1, le=9)
