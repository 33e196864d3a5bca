"""What vLLM's processes load, by path and without the rest of Fledge: `fledge_connector.py`, and nothing beside it."""
