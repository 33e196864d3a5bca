"""The OpenAI-compatible service over the engine, and the page that shows whether speculation pays."""
