#!/bin/sh
# Builds and runs with Debian's jars and no Maven:
#   ./offline.sh build                                        into target/offline, or $RUNNERD_JAVA_TARGET
#   ./offline.sh run dev.runnerd.examples.StreamExample ...   an example, once it is built
#   ./offline.sh test                                         the contract tests, once they are built
# README.md has Debian's packages.
set -eu
here=$(realpath "$(dirname "$0")")
target=${RUNNERD_JAVA_TARGET:-$here/target/offline}
classpath=$target/classes
for jar in grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub protobuf \
  proto-google-common-protos guava gson jsr305 geronimo-annotation-1.3-spec perfmark-api perfmark-impl netty-buffer \
  netty-codec netty-codec-http netty-codec-http2 netty-common netty-handler netty-resolver netty-transport \
  netty-transport-native-unix-common netty-tcnative junit4 hamcrest; do
  classpath=$classpath:/usr/share/java/$jar.jar
done
action=$1
shift
case $action in
build)
  rm -rf "$target"
  mkdir -p "$target/classes"
  sh "$here/generate.sh" "$target"
  find "$target/stubs" "$here/src" -name '*.java' > "$target/sources"
  # -J: javac ends before its own code is worth optimising; -proc:none: no processor of annotations is looked for
  javac -J-XX:TieredStopAtLevel=1 -J-XX:+UseSerialGC -encoding UTF-8 --release 17 -proc:none -nowarn \
    -cp "$classpath" -d "$target/classes" "@$target/sources"
  ;;
run) exec java "-Djava.library.path=$target/native" -cp "$classpath" "$@" ;;
test) exec java "-Djava.library.path=$target/native" -cp "$classpath" dev.runnerd.client.ContractRun ;;
*)
  echo "offline.sh: build, run CLASS or test, not $action" >&2
  exit 2
  ;;
esac
