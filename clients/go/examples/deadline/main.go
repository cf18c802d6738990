// Deadline gives a generation half a second: once the call's (an error), once the request's own (an early end).
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	runnerd "github.com/runnerd/runnerd/clients/go"
	"github.com/runnerd/runnerd/clients/go/runnerdv1"
)

const limit = 500 * time.Millisecond

func main() {
	log.SetFlags(0)
	address := flag.String("address", "127.0.0.1:50051", "host:port of the server")
	flag.Parse()

	connection, err := grpc.Dial(*address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := runnerdv1.NewInferenceServiceClient(connection)
	request := &runnerdv1.GenerateRequest{
		Prompt: &runnerdv1.GenerateRequest_Text{Text: "A very long story: "},
		Stopping: &runnerdv1.StoppingParams{
			MaxTokens: proto.Uint32(1000),
			IgnoreEos: proto.Bool(true),
		},
	}

	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if _, err := client.Generate(ctx, request); err != nil {
		fmt.Println("the call's deadline:", runnerd.Details(err).Code)
	} else {
		fmt.Println("the call's deadline: done in time")
	}

	request.Stopping.TimeLimit = durationpb.New(limit)
	response, err := client.Generate(context.Background(), request)
	if err != nil {
		log.Fatal(err)
	}
	finish := response.Outputs[0].Finish
	fmt.Printf("stopping.time_limit: %s after %d tokens\n", finish.Reason, finish.Usage.CompletionTokens)
}
