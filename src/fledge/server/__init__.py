"""The OpenAI-compatible HTTP server, and the dashboard that shows whether speculation pays."""
