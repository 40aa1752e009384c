"""The OpenAI-compatible door.

uvicorn -> gate (id, key, room) -> FastAPI routes -> answer (one stream of the service) -> writers
"""
