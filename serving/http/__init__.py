"""The OpenAI-compatible HTTP server.

uvicorn -> middleware (id, key, capacity) -> FastAPI routes -> GenerationResponse -> serializers
"""
