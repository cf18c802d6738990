#!/bin/sh
# Makes what Debian's jars need below a folder: sh generate.sh FOLDER
#   FOLDER/stubs    the stubs, by Debian's protoc. They are not in the repository: Java stubs fit the protobuf release
#                   they are made for; Maven's differ.
#   FOLDER/native   for TLS: Debian's netty offers HTTP/2 over it with OpenSSL alone, and looks for that by another name
#                   than Debian gives it
# Debian: protobuf-compiler protobuf-compiler-grpc-java-plugin libnetty-tcnative-jni
set -eu
mkdir -p "$1/stubs" "$1/native"
target=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
cp /usr/lib/*/jni/libnetty-tcnative.so "$target/native/libnetty_tcnative.so"
cd "$here/../../protos"
protoc -I. -I"$here/debian" --java_out="$target/stubs" --grpc-java_out="$target/stubs" \
  --plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" runnerd/v1/*.proto health.proto
