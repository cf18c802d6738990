// Errors asks for what is refused, and prints what the server says about it.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	runnerd "github.com/runnerd/runnerd/clients/go"
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

	_, err = runnerd.Generate(
		context.Background(),
		runnerdv1.NewInferenceServiceClient(connection),
		&runnerdv1.GenerateRequest{
			Prompt:   &runnerdv1.GenerateRequest_Text{Text: "Hello"},
			Sampling: &runnerdv1.SamplingParams{Temperature: proto.Float32(-1), TopP: proto.Float32(7)},
		},
	)
	if err == nil {
		log.Fatal("the request was not refused")
	}
	details := runnerd.Details(err)
	fmt.Println(details.Code, details.Reason)
	for _, violation := range details.Fields {
		fmt.Printf("  %s: %s\n", violation.Subject, violation.Description)
	}
	for _, violation := range details.Quotas {
		fmt.Printf("  quota %s: %s\n", violation.Subject, violation.Description)
	}
	if details.RetryAfter != nil {
		fmt.Println("  try again in", *details.RetryAfter)
	}
}
