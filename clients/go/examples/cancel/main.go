// Cancel leaves a stream after some text, and shows that the server is idle again.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"time"

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
	if err := readSome(runnerdv1.NewInferenceServiceClient(connection)); err != nil {
		log.Fatal(err)
	}

	server := runnerdv1.NewServerServiceClient(connection)
	for {
		load, err := server.GetLoad(context.Background(), &runnerdv1.GetLoadRequest{})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("running: %d, KV blocks in use: %d\n", load.NumRunning, load.NumUsedBlocks)
		if load.NumRunning == 0 && load.NumUsedBlocks == 0 {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// readSome returns after 40 bytes of text; the deferred Close cancels the call.
func readSome(client runnerdv1.InferenceServiceClient) error {
	stream, err := runnerd.Generate(context.Background(), client, &runnerdv1.GenerateRequest{
		Prompt: &runnerdv1.GenerateRequest_Text{Text: "A very long story: "},
		Stopping: &runnerdv1.StoppingParams{
			MaxTokens: proto.Uint32(1000),
			IgnoreEos: proto.Bool(true),
		},
	})
	if err != nil {
		return err
	}
	defer stream.Close()
	for length := 0; length < 40 && stream.Next(); {
		fmt.Print(stream.Chunk().Text)
		length += len(stream.Chunk().Text)
	}
	fmt.Println()
	return stream.Err()
}
