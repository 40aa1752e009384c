"""The wire format of gRPC; `scripts/make_protos.py` generates the Python code beside each .proto.

protos/jaxinfer/v1/inference.proto -> inference_pb2.py, inference_pb2.pyi, inference_pb2_grpc.py
"""
