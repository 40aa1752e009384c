"""The server around an engine: gRPC and OpenAI-compatible HTTP over one engine loop.

scripts/serve.py -> process -> grpc_server, http -> service -> loop -> Engine
"""
