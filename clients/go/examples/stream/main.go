// Stream prints an answer as it grows.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	runnerd "github.com/runnerd/runnerd/clients/go"
	"github.com/runnerd/runnerd/clients/go/runnerdv1"
)

func main() {
	log.SetFlags(0)
	address := flag.String("address", "127.0.0.1:50051", "host:port of the server")
	maxTokens := flag.Uint("max-tokens", 64, "most output tokens")
	flag.Parse()
	prompt := strings.Join(flag.Args(), " ")
	if prompt == "" {
		prompt = "The capital of France is"
	}

	connection, err := grpc.Dial(*address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := runnerdv1.NewInferenceServiceClient(connection)

	stream, err := runnerd.Generate(context.Background(), client, &runnerdv1.GenerateRequest{
		Prompt:   &runnerdv1.GenerateRequest_Text{Text: prompt},
		Stopping: &runnerdv1.StoppingParams{MaxTokens: proto.Uint32(uint32(*maxTokens))},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()
	for stream.Next() {
		fmt.Print(stream.Chunk().Text)
		if finish := stream.Chunk().Finish; finish != nil {
			fmt.Printf("\n[%s, %d tokens]\n", finish.Reason, finish.Usage.CompletionTokens)
		}
	}
	if err := stream.Err(); err != nil {
		log.Fatal(err)
	}
}
