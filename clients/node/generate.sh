#!/bin/sh
# Copies the protos, which are read when the client is loaded, to dist/, and generates their types into src/generated/.
set -eu
cd "$(dirname "$0")"
rm -rf dist/protos src/generated
mkdir -p dist/protos
cp -R ../../protos/runnerd protos/google protos/grpc dist/protos/
find dist/protos -type f ! -name '*.proto' -delete
find dist/protos -name __pycache__ -prune -exec rm -rf {} +
cd dist/protos
../../node_modules/.bin/proto-loader-gen-types --grpcLib=@grpc/grpc-js --longs=String --enums=String --defaults --oneofs \
  --includeComments --importFileExtension=.js --outDir=../../src/generated --includeDirs=. -- \
  runnerd/v1/inference.proto runnerd/v1/server.proto google/rpc/details.proto grpc/health/v1/health.proto >/dev/null
