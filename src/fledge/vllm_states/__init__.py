"""A target's hidden states, and answers, from vLLM servers: whoever reads them need not load the target."""
