package runnerd

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	"github.com/runnerd/runnerd/clients/go/runnerdv1"
)

var errNoStarted = errors.New("runnerd: the first message of the stream is not Started")

// Stream reads the chunks of a generation:
//
//	stream, err := runnerd.Generate(ctx, client, request)
//	if err != nil { ... }
//	defer stream.Close()
//	for stream.Next() {
//		fmt.Print(stream.Chunk().Text)
//	}
//	if err := stream.Err(); err != nil { ... }
//
// It is for one goroutine; Close may be called from any.
type Stream struct {
	call    runnerdv1.InferenceService_StreamGenerateClient
	cancel  context.CancelFunc
	started *runnerdv1.Started
	prompt  []*runnerdv1.Token
	chunk   *runnerdv1.OutputChunk
	err     error
}

// Generate starts a streamed generation and waits until the server has accepted it. The error is the stub's: Details
// reads it. It ends with ctx, and with Close.
func Generate(
	ctx context.Context,
	client runnerdv1.InferenceServiceClient,
	request *runnerdv1.GenerateRequest,
	options ...grpc.CallOption,
) (*Stream, error) {
	ctx, cancel := context.WithCancel(ctx)
	call, err := client.StreamGenerate(ctx, request, options...)
	if err != nil {
		cancel()
		return nil, err
	}
	first, err := call.Recv()
	if err == nil && first.GetStarted() == nil {
		err = errNoStarted
	}
	if err != nil {
		cancel()
		return nil, err
	}
	return &Stream{call: call, cancel: cancel, started: first.GetStarted()}, nil
}

// Started gives the request's id, seed and number of prompt tokens.
func (s *Stream) Started() *runnerdv1.Started { return s.started }

// Prompt gives the records of the prompt's tokens, once Next has been called, when prompt_logprobs were asked for.
func (s *Stream) Prompt() []*runnerdv1.Token { return s.prompt }

// Next waits for the next chunk. It gives false when every output has ended, or the call has failed: see Err.
func (s *Stream) Next() bool {
	for s.err == nil {
		message, err := s.call.Recv()
		if err != nil {
			s.err = err
			break
		}
		switch event := message.Event.(type) {
		case *runnerdv1.StreamGenerateResponse_Output:
			s.chunk = event.Output
			return true
		case *runnerdv1.StreamGenerateResponse_Prompt:
			s.prompt = event.Prompt.Tokens
		}
	}
	s.chunk = nil
	s.cancel()
	return false
}

// Chunk gives what Next has read. Chunks of different outputs interleave: see their Index.
func (s *Stream) Chunk() *runnerdv1.OutputChunk { return s.chunk }

// Err gives the error that ended the stream, or nil when every output has ended.
func (s *Stream) Err() error {
	if errors.Is(s.err, io.EOF) {
		return nil
	}
	return s.err
}

// Close cancels the call if it has not ended, so that the server stops generating. It may be called again.
func (s *Stream) Close() { s.cancel() }
