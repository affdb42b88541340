"""The gRPC service: the same requests, checks and engine as over HTTP. Needs the extra `grpc`."""
