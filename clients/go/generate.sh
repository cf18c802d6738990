#!/bin/sh
# Generates runnerdv1/ from protos/, or the same below the folder that is given.
# Debian: protobuf-compiler protoc-gen-go-1-5 protoc-gen-go-grpc
set -eu
target=$(realpath "${1:-$(dirname "$0")}")
cd "$(dirname "$0")/../../protos"
module=github.com/runnerd/runnerd/clients/go
protoc -I. --go_out="$target" --go_opt=module=$module --go-grpc_out="$target" --go-grpc_opt=module=$module \
  runnerd/v1/*.proto
