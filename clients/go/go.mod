module github.com/runnerd/runnerd/clients/go

go 1.25.0

// Current releases. The tests run with Debian 12's (grpc-go 1.33, protobuf-go 1.28, Go 1.19; see offline.sh), and have
// been run once with these. There is no go.sum: no module proxy was in reach; `go mod tidy` makes it.
require (
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260526163538-3dc84a4a5aaa
	google.golang.org/grpc v1.83.1
	google.golang.org/protobuf v1.36.11
)
