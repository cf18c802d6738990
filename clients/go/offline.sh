#!/bin/sh
# Runs the go command without modules, on Debian's Go libraries: ./offline.sh run ./examples/stream
# Debian: golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev
set -eu
here=$(realpath "$(dirname "$0")")
gopath=${RUNNERD_GOPATH:-$here/.gopath}
package=$gopath/src/github.com/runnerd/runnerd/clients/go
mkdir -p "$(dirname "$package")"
ln -sfn "$here" "$package"
cd "$package"
export GO111MODULE=off GOFLAGS= GOPATH="$gopath:/usr/share/gocode"
exec go "$@"
