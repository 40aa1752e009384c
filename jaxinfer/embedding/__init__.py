"""Text embedding: the engine behind `LLM.embed` and the server's embedding endpoints."""
