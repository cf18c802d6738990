// Chat holds a conversation: a line in, an answer out, until the input ends.
package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"strings"

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
	client := runnerdv1.NewInferenceServiceClient(connection)

	var messages []*runnerdv1.ChatMessage
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		messages = append(messages, &runnerdv1.ChatMessage{Role: "user", Content: lines.Text()})
		answer, err := say(client, messages)
		if err != nil {
			log.Fatal(err)
		}
		messages = append(messages, &runnerdv1.ChatMessage{Role: "assistant", Content: answer})
	}
	if err := lines.Err(); err != nil {
		log.Fatal(err)
	}
}

// say prints the answer to messages as it grows, and returns it.
func say(client runnerdv1.InferenceServiceClient, messages []*runnerdv1.ChatMessage) (string, error) {
	stream, err := runnerd.Generate(context.Background(), client, &runnerdv1.GenerateRequest{
		Prompt:   &runnerdv1.GenerateRequest_Chat{Chat: &runnerdv1.ChatPrompt{Messages: messages}},
		Stopping: &runnerdv1.StoppingParams{MaxTokens: proto.Uint32(256)},
	})
	if err != nil {
		return "", err
	}
	defer stream.Close()
	var answer strings.Builder
	for stream.Next() {
		fmt.Print(stream.Chunk().Text)
		answer.WriteString(stream.Chunk().Text)
	}
	fmt.Println()
	return answer.String(), stream.Err()
}
