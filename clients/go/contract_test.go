package runnerd_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	runnerd "github.com/runnerd/runnerd/clients/go"
	pb "github.com/runnerd/runnerd/clients/go/runnerdv1"
)

// What the server promises to any client. Each test names the environment variable that holds the address of the
// server it needs; tests/clients starts them.

const patience = 4 * time.Minute

// address gives the value of an environment variable, and skips the test without one.
func address(t *testing.T, variable string) string {
	t.Helper()
	value := os.Getenv(variable)
	if value == "" {
		t.Skip(variable + " is not set")
	}
	return value
}

func connect(t *testing.T, target string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	connection, err := grpc.Dial(target, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	return connection
}

func client(t *testing.T, variable string, options ...grpc.DialOption) (context.Context, *grpc.ClientConn) {
	t.Helper()
	connection := connect(t, address(t, variable), append(options, grpc.WithInsecure())...)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx, connection
}

func text(prompt string, maxTokens uint32) *pb.GenerateRequest {
	return &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: prompt},
		Sampling: &pb.SamplingParams{Temperature: proto.Float32(0)},
		Stopping: &pb.StoppingParams{MaxTokens: proto.Uint32(maxTokens), IgnoreEos: proto.Bool(true)},
	}
}

// answer is what a stream has given for output 0.
type answer struct {
	text     string
	ids      []uint32
	chunks   int
	finishes int
	finish   *pb.Finish
}

func (a *answer) add(chunk *pb.OutputChunk) {
	a.chunks++
	a.text += chunk.Text
	for _, token := range chunk.Tokens {
		a.ids = append(a.ids, token.Id)
	}
	if chunk.Finish != nil {
		a.finishes++
		a.finish = chunk.Finish
	}
}

func generate(ctx context.Context, service pb.InferenceServiceClient, request *pb.GenerateRequest) (*answer, error) {
	stream, err := runnerd.Generate(ctx, service, request)
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	var got answer
	for stream.Next() {
		got.add(stream.Chunk())
	}
	return &got, stream.Err()
}

// waitForLoad waits until the server's load meets the condition.
func waitForLoad(t *testing.T, ctx context.Context, connection *grpc.ClientConn, met func(*pb.GetLoadResponse) bool) {
	t.Helper()
	for {
		load, err := pb.NewServerServiceClient(connection).GetLoad(ctx, &pb.GetLoadRequest{})
		if err != nil {
			t.Fatalf("the load does not come to what is expected: %v", err)
		}
		if met(load) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func idle(load *pb.GetLoadResponse) bool {
	return load.NumRunning == 0 && load.NumWaiting == 0 && load.NumUsedBlocks == 0
}

const long = 4000 // tokens; no test waits for so many

// watchForEarlyEnd gives a function that waits until the server is idle, and checks that it got there before it had
// generated all of a long text.
func watchForEarlyEnd(t *testing.T, ctx context.Context, connection *grpc.ClientConn) func() {
	t.Helper()
	var before, after uint64
	waitForLoad(t, ctx, connection, func(load *pb.GetLoadResponse) bool {
		before = load.GenerationTokens
		return idle(load)
	})
	return func() {
		t.Helper()
		waitForLoad(t, ctx, connection, func(load *pb.GetLoadResponse) bool {
			after = load.GenerationTokens
			return idle(load)
		})
		if after-before >= long {
			t.Errorf("%d tokens were generated before the end", after-before)
		}
	}
}

func TestStreamGivesWhatTheUnaryCallGives(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_ADDRESS")
	service := pb.NewInferenceServiceClient(connection)
	request := text("Once upon a time", 48)
	request.RequestId = proto.String("go-order")
	request.Output = &pb.OutputOptions{Tokens: proto.Bool(true), PromptLogprobs: proto.Uint32(0)}

	stream, err := runnerd.Generate(ctx, service, request)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	var got answer
	for stream.Next() {
		got.add(stream.Chunk())
		if got.finishes > 0 && stream.Chunk().Finish == nil {
			t.Error("a chunk came after the finish")
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	whole, err := service.Generate(ctx, request)
	if err != nil {
		t.Fatal(err)
	}

	var ids []uint32
	for _, token := range whole.Outputs[0].Tokens {
		ids = append(ids, token.Id)
	}
	if fmt.Sprint(got.ids) != fmt.Sprint(ids) || len(ids) != 48 {
		t.Errorf("streamed ids %v, unary ids %v", got.ids, ids)
	}
	if got.text != whole.Outputs[0].Text {
		t.Errorf("streamed text %q, unary text %q", got.text, whole.Outputs[0].Text)
	}
	if got.finishes != 1 || got.finish.Reason != pb.FinishReason_FINISH_REASON_LENGTH {
		t.Errorf("%d finishes, the last one %v", got.finishes, got.finish)
	}
	if got.finish.Usage.CompletionTokens != 48 {
		t.Errorf("usage is %v", got.finish.Usage)
	}
	if started := stream.Started(); started.RequestId != "go-order" || started.Seed == 0 && whole.Seed != 0 {
		t.Errorf("started is %v", started)
	}
	if prompt := stream.Prompt(); len(prompt) != int(stream.Started().PromptTokens)-1 {
		t.Errorf("%d records of %d prompt tokens", len(prompt), stream.Started().PromptTokens)
	}
}

func TestUnicodeSurvivesTokenizing(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_ADDRESS")
	service := pb.NewInferenceServiceClient(connection)
	const prompt = "naïve Grüße, 世界 🚀 שלום"
	tokens, err := service.Tokenize(ctx, &pb.TokenizeRequest{
		Prompt:           &pb.TokenizeRequest_Text{Text: prompt},
		AddSpecialTokens: proto.Bool(false),
	})
	if err != nil {
		t.Fatal(err)
	}
	back, err := service.Detokenize(ctx, &pb.DetokenizeRequest{Ids: tokens.Ids})
	if err != nil {
		t.Fatal(err)
	}
	if back.Text != prompt {
		t.Errorf("%q came back as %q", prompt, back.Text)
	}
}

func TestUnicodeStreamsInWholeCharacters(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_SCRIPTED_ADDRESS")
	script := address(t, "RUNNERD_SCRIPT")
	request := text("x", 0)
	request.Stopping = nil
	request.Output = &pb.OutputOptions{Tokens: proto.Bool(true)}
	stream, err := runnerd.Generate(ctx, pb.NewInferenceServiceClient(connection), request)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	var got answer
	for stream.Next() {
		got.add(stream.Chunk())
		if strings.ContainsRune(stream.Chunk().Text, '\uFFFD') || !strings.HasPrefix(script, got.text) {
			t.Fatalf("the text so far is %q", got.text)
		}
	}
	if stream.Err() != nil || got.text != script {
		t.Errorf("got %q, %v; expected %q", got.text, stream.Err(), script)
	}
	if got.finish.GetReason() != pb.FinishReason_FINISH_REASON_STOP || len(got.ids) != len(script)+1 {
		t.Errorf("%d tokens for %d bytes; %v", len(got.ids), len(script), got.finish)
	}
}

func TestLeavingAStreamFreesItsSlot(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_ADDRESS")
	ended := watchForEarlyEnd(t, ctx, connection)
	stream, err := runnerd.Generate(ctx, pb.NewInferenceServiceClient(connection), text("A long story: ", long))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	waitForLoad(t, ctx, connection, func(load *pb.GetLoadResponse) bool {
		return load.NumRunning == 1 && load.NumUsedBlocks > 0
	})
	stream.Close()
	for stream.Next() {
	}
	if code := runnerd.Details(stream.Err()).Code; code != codes.Canceled {
		t.Errorf("the stream ended with %v", stream.Err())
	}
	ended()
}

func TestAbortEndsTheCall(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_ADDRESS")
	ended := watchForEarlyEnd(t, ctx, connection)
	service := pb.NewInferenceServiceClient(connection)
	stream, err := runnerd.Generate(ctx, service, text("A long story: ", long))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	request := &pb.AbortRequest{RequestId: stream.Started().RequestId}
	for _, expected := range []bool{true, false} {
		aborted, err := service.Abort(ctx, request)
		if err != nil || aborted.Aborted != expected {
			t.Errorf("aborted: %v, %v", aborted, err)
		}
		for stream.Next() {
		}
	}
	if details := runnerd.Details(stream.Err()); details.Code != codes.Canceled || details.Reason != "REQUEST_ABORTED" {
		t.Errorf("the stream ended with %+v", details)
	}
	ended()
}

func TestADeadlineEndsTheCall(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_ADDRESS")
	ended := watchForEarlyEnd(t, ctx, connection)
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	_, err := generate(short, pb.NewInferenceServiceClient(connection), text("A long story: ", long))
	if err == nil {
		t.Fatal("the whole text came before the deadline")
	}
	if details := runnerd.Details(fmt.Errorf("wrapped: %w", err)); details.Code != codes.DeadlineExceeded {
		t.Errorf("the call ended with %+v", details)
	}
	ended()
}

func TestARefusalNamesTheFields(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_ADDRESS")
	request := text("x", 1)
	request.Sampling = &pb.SamplingParams{Temperature: proto.Float32(-1), TopP: proto.Float32(7)}
	_, err := runnerd.Generate(ctx, pb.NewInferenceServiceClient(connection), request)
	if err == nil {
		t.Fatal("the request was not refused")
	}
	details := runnerd.Details(err)
	if details.Code != codes.InvalidArgument || details.Reason != "INVALID_REQUEST" || details.RetryAfter != nil {
		t.Errorf("refused with %+v", details)
	}
	var fields []string
	for _, violation := range details.Fields {
		fields = append(fields, violation.Subject)
		if violation.Description == "" {
			t.Errorf("%s has no description", violation.Subject)
		}
	}
	if fmt.Sprint(fields) != "[sampling.temperature sampling.top_p]" {
		t.Errorf("the fields are %v", fields)
	}
	if other := runnerd.Details(errors.New("no")); other.Code != codes.Unknown || other.Message != "no" {
		t.Errorf("an error that is not gRPC's is %+v", other)
	}
}

func TestAFullQueueNamesTheQuotaAndWhenToRetry(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_SMALL_ADDRESS")
	service := pb.NewInferenceServiceClient(connection)
	var open []*runnerd.Stream
	// One runs, one waits.
	for range [2]int{} {
		stream, err := runnerd.Generate(ctx, service, text("x", 2000))
		if err != nil {
			t.Fatal(err)
		}
		defer stream.Close()
		open = append(open, stream)
		waitForLoad(t, ctx, connection, func(load *pb.GetLoadResponse) bool {
			return int(load.NumRunning) == 1 && int(load.NumWaiting) == len(open)-1
		})
	}
	_, err := runnerd.Generate(ctx, service, text("x", 1))
	if err == nil {
		t.Fatal("the request was not refused")
	}
	details := runnerd.Details(err)
	if details.Code != codes.ResourceExhausted || details.Reason != "OVERLOADED" {
		t.Errorf("refused with %+v", details)
	}
	if len(details.Quotas) != 1 || details.Quotas[0].Subject == "" || details.Quotas[0].Description == "" {
		t.Errorf("the quotas are %+v", details.Quotas)
	}
	if details.RetryAfter == nil || *details.RetryAfter <= 0 {
		t.Errorf("retry after %v", details.RetryAfter)
	}
	for _, stream := range open {
		stream.Close()
	}
	waitForLoad(t, ctx, connection, idle)
}

func TestASlowReaderHoldsUpNobodyAndLosesNothing(t *testing.T) {
	const window = 65535 // bytes; the least that HTTP/2 allows as a start
	ctx, connection := client(t, "RUNNERD_ADDRESS", grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(window))
	_, other := client(t, "RUNNERD_ADDRESS")
	request := text("A long story: ", 600)
	request.Output = &pb.OutputOptions{Tokens: proto.Bool(true), Logprobs: proto.Uint32(20)}
	stream, err := runnerd.Generate(ctx, pb.NewInferenceServiceClient(connection), request)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	var got answer
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	got.add(stream.Chunk())
	// Nothing is read from here on. Another client is served meanwhile, and the generation comes to its end.
	if _, err := generate(ctx, pb.NewInferenceServiceClient(other), text("y", 8)); err != nil {
		t.Error(err)
	}
	waitForLoad(t, ctx, other, idle)
	size := 0
	for stream.Next() {
		got.add(stream.Chunk())
		size += proto.Size(stream.Chunk())
	}
	if stream.Err() != nil || got.finishes != 1 || len(got.ids) != 600 {
		t.Errorf("%d tokens, %d finishes, %v", len(got.ids), got.finishes, stream.Err())
	}
	if size < 2*window {
		t.Errorf("%d bytes fit into the window: nothing was held back", size)
	}
	// What waited for the reader was merged.
	if got.chunks > 540 {
		t.Errorf("600 tokens came in %d chunks", got.chunks)
	}
}

func TestAHundredStreamsAtOnceKeepTheirTokensApart(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_ADDRESS")
	service := pb.NewInferenceServiceClient(connection)
	var streamed [100]string
	var group sync.WaitGroup
	for i := range streamed {
		group.Add(1)
		go func(i int) {
			defer group.Done()
			request := text(fmt.Sprintf("Number %d is", i), 16)
			got, err := generate(ctx, service, request)
			if err != nil {
				t.Errorf("stream %d: %v", i, err)
				return
			}
			whole, err := service.Generate(ctx, request)
			if err != nil {
				t.Errorf("call %d: %v", i, err)
				return
			}
			streamed[i] = got.text
			if got.text != whole.Outputs[0].Text || got.finish.Usage.CompletionTokens != 16 {
				t.Errorf("stream %d: %q, call: %q", i, got.text, whole.Outputs[0].Text)
			}
		}(i)
	}
	group.Wait()
	distinct := map[string]bool{}
	for _, text := range streamed {
		distinct[text] = true
	}
	if len(distinct) < 10 {
		t.Errorf("100 prompts have %d answers", len(distinct))
	}
	waitForLoad(t, ctx, connection, idle)
}

func TestHealthIsServing(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_ADDRESS")
	for _, service := range []string{"", "runnerd.v1.InferenceService"} {
		health, err := grpc_health_v1.NewHealthClient(connection).Check(
			ctx,
			&grpc_health_v1.HealthCheckRequest{Service: service},
		)
		if err != nil || health.Status != grpc_health_v1.HealthCheckResponse_SERVING {
			t.Errorf("%q: %v, %v", service, health, err)
		}
	}
}

func TestAChannelOutlivesItsServer(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_RESTARTED_ADDRESS")
	service := pb.NewInferenceServiceClient(connection)
	if _, err := generate(ctx, service, text("x", 4)); err != nil {
		t.Fatal(err)
	}
	stream, err := runnerd.Generate(ctx, service, text("x", 2000))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	// Whoever runs this test kills the server when it reads the line, starts it again and answers.
	fmt.Println("restart the server")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	for stream.Next() {
	}
	if code := runnerd.Details(stream.Err()).Code; stream.Err() == nil || code != codes.Unavailable {
		t.Errorf("the stream of the killed server ended with %v", stream.Err())
	}
	response, err := service.Generate(ctx, text("x", 4), grpc.WaitForReady(true))
	if err != nil || response.Outputs[0].Finish == nil {
		t.Errorf("after the restart: %v, %v", response, err)
	}
}

func TestPingsEveryTenSecondsAreAccepted(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_PINGED_ADDRESS", grpc.WithKeepaliveParams(keepalive.ClientParameters{
		Time:                10 * time.Second,
		Timeout:             5 * time.Second,
		PermitWithoutStream: true,
	}))
	server := pb.NewServerServiceClient(connection)
	if _, err := server.GetLoad(ctx, &pb.GetLoadRequest{}); err != nil {
		t.Fatal(err)
	}
	ready := connection.GetState()
	quiet, cancel := context.WithTimeout(ctx, 45*time.Second)
	defer cancel()
	if connection.WaitForStateChange(quiet, ready) {
		t.Errorf("the connection went from %v to %v", ready, connection.GetState())
	}
	if _, err := server.GetLoad(ctx, &pb.GetLoadRequest{}); err != nil {
		t.Error(err)
	}
}

// trust gives the TLS settings of a client that knows the server's authority.
func trust(t *testing.T) *tls.Config {
	t.Helper()
	authority, err := os.ReadFile(address(t, "RUNNERD_TLS_CA"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authority) {
		t.Fatal("no certificate in the authority's file")
	}
	return &tls.Config{RootCAs: roots}
}

func encrypted(config *tls.Config) grpc.DialOption {
	return grpc.WithTransportCredentials(credentials.NewTLS(config))
}

func TestTLS(t *testing.T) {
	target := address(t, "RUNNERD_TLS_ADDRESS")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()

	trusting := connect(t, target, encrypted(trust(t)))
	got, err := generate(ctx, pb.NewInferenceServiceClient(trusting), text("x", 4))
	if err != nil || got.finish.Usage.CompletionTokens != 4 {
		t.Errorf("%v, %v", got, err)
	}

	distrusting := connect(t, target, encrypted(&tls.Config{RootCAs: x509.NewCertPool()}))
	_, err = generate(ctx, pb.NewInferenceServiceClient(distrusting), text("x", 4))
	if err == nil || runnerd.Details(err).Code != codes.Unavailable || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a server of an unknown authority was trusted: %v", err)
	}
}

func TestCertificateAndTokenAreBothAskedFor(t *testing.T) {
	target := address(t, "RUNNERD_MUTUAL_TLS_ADDRESS")
	certificate, err := tls.LoadX509KeyPair(address(t, "RUNNERD_CLIENT_CERT"), address(t, "RUNNERD_CLIENT_KEY"))
	if err != nil {
		t.Fatal(err)
	}
	known := trust(t)
	known.Certificates = []tls.Certificate{certificate}
	token := grpc.WithPerRPCCredentials(runnerd.BearerToken(address(t, "RUNNERD_TOKEN")))
	wrong := grpc.WithPerRPCCredentials(runnerd.BearerToken("another-token-0123456789"))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()

	for name, one := range map[string]struct {
		options  []grpc.DialOption
		expected codes.Code
	}{
		"both":           {[]grpc.DialOption{encrypted(known), token}, codes.OK},
		"no token":       {[]grpc.DialOption{encrypted(known)}, codes.Unauthenticated},
		"a wrong token":  {[]grpc.DialOption{encrypted(known), wrong}, codes.Unauthenticated},
		"no certificate": {[]grpc.DialOption{encrypted(trust(t)), token}, codes.Unavailable},
	} {
		connection := connect(t, target, one.options...)
		got, err := generate(ctx, pb.NewInferenceServiceClient(connection), text("x", 4))
		code := codes.OK
		if err != nil {
			code = runnerd.Details(err).Code
		}
		if code != one.expected || err == nil && got.finish.Usage.CompletionTokens != 4 {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func TestATokenIsNotSentInPlainText(t *testing.T) {
	token := grpc.WithPerRPCCredentials(runnerd.BearerToken("a-token-0123456789"))
	if connection, err := grpc.Dial(address(t, "RUNNERD_ADDRESS"), grpc.WithInsecure(), token); err == nil {
		connection.Close()
		t.Error("a token was taken for a connection without TLS")
	}
}

func TestUnixSocket(t *testing.T) {
	ctx, connection := client(t, "RUNNERD_UNIX_ADDRESS")
	got, err := generate(ctx, pb.NewInferenceServiceClient(connection), text("x", 4))
	if err != nil || got.finish.Usage.CompletionTokens != 4 {
		t.Errorf("%v, %v", got, err)
	}
}
