// Health asks whether generations are served, and what serves them.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/runnerd/runnerd/clients/go/runnerdv1"
)

func main() {
	log.SetFlags(0)
	address := flag.String("address", "127.0.0.1:50051", "host:port of the server")
	flag.Parse()

	connection, err := grpc.Dial(*address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	health, err := grpc_health_v1.NewHealthClient(connection).Check(
		context.Background(),
		&grpc_health_v1.HealthCheckRequest{Service: "runnerd.v1.InferenceService"},
	)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(health.Status)
	if health.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		os.Exit(1)
	}
	model, err := runnerdv1.NewModelServiceClient(connection).GetModelInfo(
		context.Background(),
		&runnerdv1.GetModelInfoRequest{},
	)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s: %s, up to %d tokens\n", model.Name, model.Architecture, model.MaxModelLen)
}
