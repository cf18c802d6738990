#!/bin/sh
# Generates the stubs into a folder, with Debian's protoc, for Debian's jars: sh generate.sh FOLDER
# They are not in the repository: Java stubs fit the protobuf release they are made for; Maven's differ.
# Debian: protobuf-compiler protobuf-compiler-grpc-java-plugin
set -eu
target=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
cd "$here/../../protos"
protoc -I. -I"$here/debian" --java_out="$target" --grpc-java_out="$target" \
  --plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" runnerd/v1/*.proto health.proto
