"""The wire format of the gRPC door; `scripts/make_protos.py` writes the Python beside each .proto.

protos/jaxinfer/v1/inference.proto -> inference_pb2.py, inference_pb2.pyi, inference_pb2_grpc.py
"""
