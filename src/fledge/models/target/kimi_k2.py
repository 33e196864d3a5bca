"""Kimi K2: DeepSeek V3 under another name, and in K2.5 and K2.6 the language model of a wrapper."""

from dataclasses import replace

from fledge.models.target import deepseek_v3

FAMILY = replace(
    deepseek_v3.FAMILY,
    name="kimi_k2",
    wrappers=("KimiK25ForConditionalGeneration",),
)
