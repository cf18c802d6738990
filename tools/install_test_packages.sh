#!/bin/sh
# Installs what the tests of the Go and the Java client, the status page and abuse of HTTP/2 need, of Debian. Elsewhere it
# says what is not tested.
set -eu
packages="protobuf-compiler golang-go protoc-gen-go-1-5 protoc-gen-go-grpc golang-google-grpc-dev
golang-google-protobuf-dev golang-github-golang-protobuf-1-5-dev default-jdk-headless protobuf-compiler-grpc-java-plugin
libgrpc-java libprotobuf-java libnetty-java libnetty-tcnative-java libnetty-tcnative-jni libperfmark-java
libgoogle-common-protos-java libgoogle-gson-java libgeronimo-annotation-1.3-spec-java libguava-java libjsr305-java junit4
maven libmaven-compiler-plugin-java libmaven-resources-plugin-java libsurefire-java libexec-maven-plugin-java
chromium nghttp2-client"
# shellcheck disable=SC2086 # a list of words
if dpkg-query --show $packages > /dev/null 2>&1; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "not root on Debian: the Go and the Java client, the status page and abuse by h2load are tested only if their packages are installed"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt="apt-get --quiet=2 -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0"
# shellcheck disable=SC2086
if ! $apt update || ! $apt install --yes --no-install-recommends $packages > /dev/null; then
  echo "Debian's packages cannot be installed: the Go and the Java client, the status page and abuse by h2load are not tested" >&2
fi
