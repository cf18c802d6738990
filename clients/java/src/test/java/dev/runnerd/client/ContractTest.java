package dev.runnerd.client;

import static dev.runnerd.client.Server.LONG;
import static dev.runnerd.client.Server.PATIENCE_SECONDS;
import static dev.runnerd.client.Server.text;
import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertFalse;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import dev.runnerd.v1.AbortRequest;
import dev.runnerd.v1.DetokenizeRequest;
import dev.runnerd.v1.FinishReason;
import dev.runnerd.v1.GenerateRequest;
import dev.runnerd.v1.GenerateResponse;
import dev.runnerd.v1.InferenceServiceGrpc;
import dev.runnerd.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.runnerd.v1.OutputChunk;
import dev.runnerd.v1.OutputOptions;
import dev.runnerd.v1.SamplingParams;
import dev.runnerd.v1.Token;
import dev.runnerd.v1.TokenizeRequest;
import io.grpc.ChannelCredentials;
import io.grpc.CompositeChannelCredentials;
import io.grpc.ConnectivityState;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthCheckResponse;
import io.grpc.health.v1.HealthGrpc;
import java.io.BufferedReader;
import java.io.File;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.Iterator;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.junit.Test;

/**
 * What the server promises to any client. Each test names the environment variable that holds the address of the server
 * it needs, and is skipped without it; tests/clients starts them.
 */
public class ContractTest {
  @Test
  public void streamGivesWhatTheUnaryCallGives() {
    try (Server server = Server.at("RUNNERD_ADDRESS")) {
      GenerateRequest request =
          text("Once upon a time", 48)
              .setRequestId("java-order")
              .setOutput(OutputOptions.newBuilder().setTokens(true).setPromptLogprobs(0))
              .build();
      try (GenerationStream stream = GenerationStream.open(server.stub(), request)) {
        Answer answer = Answer.of(stream);
        GenerateResponse whole = server.stub().generate(request);
        assertEquals(whole.getOutputs(0).getTokensList().stream().map(Token::getId).toList(), answer.ids);
        assertEquals(48, answer.ids.size());
        assertEquals(whole.getOutputs(0).getText(), answer.text.toString());
        assertEquals(1, answer.finishes.size());
        assertEquals(FinishReason.FINISH_REASON_LENGTH, answer.finishes.get(0).getReason());
        assertEquals(48, answer.finishes.get(0).getUsage().getCompletionTokens());
        assertEquals("java-order", stream.started().getRequestId());
        assertEquals(stream.started().getPromptTokens() - 1, stream.prompt().size());
      }
    }
  }

  @Test
  public void unicodeSurvivesTokenizing() {
    try (Server server = Server.at("RUNNERD_ADDRESS")) {
      String prompt = "naïve Grüße, 世界 🚀 שלום";
      TokenizeRequest request = TokenizeRequest.newBuilder().setText(prompt).setAddSpecialTokens(false).build();
      List<Integer> ids = server.stub().tokenize(request).getIdsList();
      assertEquals(
          prompt, server.stub().detokenize(DetokenizeRequest.newBuilder().addAllIds(ids).build()).getText());
    }
  }

  @Test
  public void unicodeStreamsInWholeCharacters() {
    try (Server server = Server.at("RUNNERD_SCRIPTED_ADDRESS")) {
      String script = Server.environment("RUNNERD_SCRIPT");
      GenerateRequest request =
          text("x", 1).clearStopping().setOutput(OutputOptions.newBuilder().setTokens(true)).build();
      Answer answer = new Answer();
      try (GenerationStream stream = GenerationStream.open(server.stub(), request)) {
        for (OutputChunk chunk : stream) {
          answer.add(chunk);
          assertTrue(answer.text.toString(), script.startsWith(answer.text.toString()));
        }
      }
      assertEquals(script, answer.text.toString());
      assertEquals(FinishReason.FINISH_REASON_STOP, answer.finishes.get(0).getReason());
      assertEquals(script.getBytes(StandardCharsets.UTF_8).length + 1, answer.ids.size());
    }
  }

  @Test
  public void leavingAStreamFreesItsSlot() throws InterruptedException {
    try (Server server = Server.at("RUNNERD_ADDRESS")) {
      long before = server.waitUntilIdle();
      GenerationStream left;
      try (GenerationStream stream = GenerationStream.open(server.stub(), text("A long story: ", LONG).build())) {
        left = stream;
        stream.iterator().next();
        server.waitFor(load -> load.getNumRunning() == 1 && load.getNumUsedBlocks() > 0);
      }
      StatusRuntimeException error = assertThrows(StatusRuntimeException.class, () -> Answer.of(left));
      assertEquals(Status.Code.CANCELLED, ErrorDetails.of(error).code());
      assertEndedEarly(server, before);
    }
  }

  @Test
  public void abortEndsTheCall() throws InterruptedException {
    try (Server server = Server.at("RUNNERD_ADDRESS")) {
      long before = server.waitUntilIdle();
      try (GenerationStream stream = GenerationStream.open(server.stub(), text("A long story: ", LONG).build())) {
        AbortRequest abort = AbortRequest.newBuilder().setRequestId(stream.started().getRequestId()).build();
        assertTrue(server.stub().abort(abort).getAborted());
        StatusRuntimeException error = assertThrows(StatusRuntimeException.class, () -> Answer.of(stream));
        assertEquals(Status.Code.CANCELLED, ErrorDetails.of(error).code());
        assertEquals("REQUEST_ABORTED", ErrorDetails.of(error).reason());
        assertFalse(server.stub().abort(abort).getAborted());
      }
      assertEndedEarly(server, before);
    }
  }

  @Test
  public void aDeadlineEndsTheCall() throws InterruptedException {
    try (Server server = Server.at("RUNNERD_ADDRESS")) {
      long before = server.waitUntilIdle();
      InferenceServiceBlockingStub stub = server.stub().withDeadlineAfter(300, TimeUnit.MILLISECONDS);
      StatusRuntimeException error =
          assertThrows(
              StatusRuntimeException.class,
              () -> Answer.of(GenerationStream.open(stub, text("A long story: ", LONG).build())));
      assertEquals(
          Status.Code.DEADLINE_EXCEEDED, ErrorDetails.of(new RuntimeException("wrapped", error)).code());
      assertEndedEarly(server, before);
    }
  }

  private static void assertEndedEarly(Server server, long tokensBefore) throws InterruptedException {
    long generated = server.waitUntilIdle() - tokensBefore;
    assertTrue(generated + " tokens were generated before the end", generated < LONG);
  }

  @Test
  public void aRefusalNamesTheFields() {
    try (Server server = Server.at("RUNNERD_ADDRESS")) {
      GenerateRequest request =
          text("x", 1).setSampling(SamplingParams.newBuilder().setTemperature(-1).setTopP(7)).build();
      StatusRuntimeException error =
          assertThrows(StatusRuntimeException.class, () -> GenerationStream.open(server.stub(), request));
      ErrorDetails details = ErrorDetails.of(error);
      assertEquals(Status.Code.INVALID_ARGUMENT, details.code());
      assertEquals("INVALID_REQUEST", details.reason());
      assertEquals(
          List.of("sampling.temperature", "sampling.top_p"),
          details.fields().stream().map(ErrorDetails.Violation::subject).toList());
      assertTrue(details.fields().stream().noneMatch(one -> one.description().isEmpty()));
      assertTrue(details.retryAfter().isEmpty());
    }
    ErrorDetails other = ErrorDetails.of(new IllegalStateException("no"));
    assertEquals(Status.Code.UNKNOWN, other.code());
    assertEquals("no", other.message());
  }

  @Test
  public void aFullQueueNamesTheQuotaAndWhenToRetry() throws InterruptedException {
    try (Server server = Server.at("RUNNERD_SMALL_ADDRESS")) {
      GenerateRequest request = text("x", 2000).build();
      try (GenerationStream running = GenerationStream.open(server.stub(), request)) {
        server.waitFor(load -> load.getNumRunning() == 1);
        try (GenerationStream waiting = GenerationStream.open(server.stub(), request)) {
          server.waitFor(load -> load.getNumWaiting() == 1);
          StatusRuntimeException error =
              assertThrows(StatusRuntimeException.class, () -> GenerationStream.open(server.stub(), request));
          ErrorDetails details = ErrorDetails.of(error);
          assertEquals(Status.Code.RESOURCE_EXHAUSTED, details.code());
          assertEquals("OVERLOADED", details.reason());
          assertEquals(1, details.quotas().size());
          assertFalse(details.quotas().get(0).subject().isEmpty());
          assertFalse(details.quotas().get(0).description().isEmpty());
          assertTrue(details.retryAfter().orElseThrow().compareTo(Duration.ZERO) > 0);
        }
      }
      server.waitUntilIdle();
    }
  }

  @Test
  public void aSlowReaderHoldsUpNobodyAndLosesNothing() throws InterruptedException {
    int window = 65535; // bytes; what HTTP/2 starts with
    try (Server server = Server.at("RUNNERD_ADDRESS", builder -> builder.flowControlWindow(window));
        Server other = Server.at("RUNNERD_ADDRESS")) {
      GenerateRequest request =
          text("A long story: ", 600)
              .setOutput(OutputOptions.newBuilder().setTokens(true).setLogprobs(20))
              .build();
      try (GenerationStream stream = GenerationStream.open(server.stub(), request)) {
        Iterator<OutputChunk> chunks = stream.iterator();
        Answer answer = new Answer();
        answer.add(chunks.next());
        // Nothing is read from here on. Another client is served meanwhile, and the generation comes to its end.
        assertEquals(1, other.stub().generate(text("y", 8).build()).getOutputsCount());
        other.waitUntilIdle();
        chunks.forEachRemaining(answer::add);
        assertEquals(600, answer.ids.size());
        assertEquals(1, answer.finishes.size());
        assertTrue(answer.bytes + " bytes fit into the window", answer.bytes > 2 * window);
        // What waited for the reader was merged.
        assertTrue("600 tokens came in " + answer.chunks + " chunks", answer.chunks <= 540);
      }
    }
  }

  @Test
  public void aHundredStreamsAtOnceKeepTheirTokensApart() throws Exception {
    ExecutorService threads = Executors.newFixedThreadPool(100);
    try (Server server = Server.at("RUNNERD_ADDRESS")) {
      List<Future<String>> answers = new ArrayList<>();
      for (int i = 0; i < 100; i++) {
        GenerateRequest request = text("Number " + i + " is", 16).build();
        answers.add(
            threads.submit(
                () -> {
                  try (GenerationStream stream = GenerationStream.open(server.stub(), request)) {
                    Answer answer = Answer.of(stream);
                    assertEquals(16, answer.finishes.get(0).getUsage().getCompletionTokens());
                    assertEquals(
                        server.stub().generate(request).getOutputs(0).getText(), answer.text.toString());
                    return answer.text.toString();
                  }
                }));
      }
      Set<String> distinct = new HashSet<>();
      for (Future<String> answer : answers) {
        distinct.add(answer.get(PATIENCE_SECONDS, TimeUnit.SECONDS));
      }
      assertTrue("100 prompts have " + distinct.size() + " answers", distinct.size() >= 10);
      server.waitUntilIdle();
    } finally {
      threads.shutdownNow();
    }
  }

  @Test
  public void healthIsServing() {
    try (Server server = Server.at("RUNNERD_ADDRESS")) {
      for (String service : List.of("", "runnerd.v1.InferenceService")) {
        HealthCheckRequest request = HealthCheckRequest.newBuilder().setService(service).build();
        assertEquals(
            HealthCheckResponse.ServingStatus.SERVING,
            HealthGrpc.newBlockingStub(server.channel)
                .withDeadlineAfter(PATIENCE_SECONDS, TimeUnit.SECONDS)
                .check(request)
                .getStatus());
      }
    }
  }

  @Test
  public void aChannelOutlivesItsServer() throws Exception {
    try (Server server = Server.at("RUNNERD_RESTARTED_ADDRESS")) {
      server.stub().generate(text("x", 4).build());
      try (GenerationStream stream = GenerationStream.open(server.stub(), text("x", 2000).build())) {
        // Whoever runs this test kills the server when it reads the line, starts it again and answers.
        System.out.println("restart the server");
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8)).readLine();
        StatusRuntimeException error = assertThrows(StatusRuntimeException.class, () -> Answer.of(stream));
        assertEquals(Status.Code.UNAVAILABLE, ErrorDetails.of(error).code());
      }
      assertEquals(1, server.stub().withWaitForReady().generate(text("x", 4).build()).getOutputsCount());
    }
  }

  @Test
  public void pingsEveryTenSecondsAreAccepted() throws InterruptedException {
    try (Server server =
        Server.at(
            "RUNNERD_PINGED_ADDRESS",
            builder -> builder.keepAliveTime(10, TimeUnit.SECONDS).keepAliveWithoutCalls(true))) {
      server.load();
      CountDownLatch changed = new CountDownLatch(1);
      server.channel.notifyWhenStateChanged(ConnectivityState.READY, changed::countDown);
      assertFalse("the connection was closed", changed.await(45, TimeUnit.SECONDS));
      server.load();
    }
  }

  @Test
  public void tls() throws Exception {
    String target = Server.environment("RUNNERD_TLS_ADDRESS");
    assertEquals(Status.Code.OK, askedWith(target, trusting().build()).getCode());

    Status distrusted = askedWith(target, TlsChannelCredentials.create());
    assertEquals(Status.Code.UNAVAILABLE, distrusted.getCode());
    String causes = causes(distrusted.getCause());
    assertTrue(causes, causes.contains("unable to find valid certification path"));
  }

  @Test
  public void certificateAndTokenAreBothAskedFor() throws Exception {
    String target = Server.environment("RUNNERD_MUTUAL_TLS_ADDRESS");
    File certificate = new File(Server.environment("RUNNERD_CLIENT_CERT"));
    File key = new File(Server.environment("RUNNERD_CLIENT_KEY"));
    ChannelCredentials known = trusting().keyManager(certificate, key).build();
    BearerToken token = new BearerToken(Server.environment("RUNNERD_TOKEN"));
    BearerToken wrong = new BearerToken("another-token-0123456789");

    assertEquals(Status.Code.OK, askedWith(target, CompositeChannelCredentials.create(known, token)).getCode());
    assertEquals(Status.Code.UNAUTHENTICATED, askedWith(target, known).getCode());
    assertEquals(
        Status.Code.UNAUTHENTICATED,
        askedWith(target, CompositeChannelCredentials.create(known, wrong)).getCode());
    assertEquals(
        Status.Code.UNAVAILABLE,
        askedWith(target, CompositeChannelCredentials.create(trusting().build(), token)).getCode());
  }

  @Test
  public void aTokenIsNotSentInPlainText() {
    String target = Server.environment("RUNNERD_ADDRESS");
    ChannelCredentials open =
        CompositeChannelCredentials.create(
            InsecureChannelCredentials.create(), new BearerToken("a-token-0123456789"));
    Status status = askedWith(target, open);
    assertEquals(Status.Code.UNAUTHENTICATED, status.getCode());
    assertEquals(BearerToken.NO_TLS, status.getDescription());
  }

  private static TlsChannelCredentials.Builder trusting() throws IOException {
    return TlsChannelCredentials.newBuilder().trustManager(new File(Server.environment("RUNNERD_TLS_CA")));
  }

  /** Asks for four tokens over a connection of its own; gives how that ended. */
  private static Status askedWith(String target, ChannelCredentials credentials) {
    ManagedChannel channel = Grpc.newChannelBuilder(target, credentials).build();
    try {
      GenerateResponse response =
          InferenceServiceGrpc.newBlockingStub(channel)
              .withDeadlineAfter(PATIENCE_SECONDS, TimeUnit.SECONDS)
              .generate(text("x", 4).build());
      assertEquals(4, response.getOutputs(0).getFinish().getUsage().getCompletionTokens());
      return Status.OK;
    } catch (StatusRuntimeException error) {
      return error.getStatus();
    } finally {
      channel.shutdownNow();
    }
  }

  private static String causes(Throwable error) {
    StringBuilder causes = new StringBuilder();
    for (Throwable one = error; one != null; one = one.getCause()) {
      causes.append(one).append('\n');
    }
    return causes.toString();
  }
}
