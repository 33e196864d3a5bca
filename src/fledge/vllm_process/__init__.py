"""vLLM as another process: found, started, asked over HTTP, and ended. Nothing here imports vLLM or torch."""
