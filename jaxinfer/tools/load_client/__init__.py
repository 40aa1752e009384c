"""A load client for OpenAI-compatible endpoints and this project's gRPC: `jaxinfer bench serve`."""
