"""A load generator for OpenAI-compatible servers: ours, vLLM, SGLang."""
