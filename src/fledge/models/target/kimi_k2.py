"""Kimi K2: DeepSeek V3 under another name."""

from dataclasses import replace

from fledge.models.target import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, name="kimi_k2")
