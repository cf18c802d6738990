package dev.runnerd.client;

import static org.junit.Assert.assertTrue;
import static org.junit.Assume.assumeNotNull;

import dev.runnerd.v1.GenerateRequest;
import dev.runnerd.v1.GetLoadRequest;
import dev.runnerd.v1.GetLoadResponse;
import dev.runnerd.v1.InferenceServiceGrpc;
import dev.runnerd.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.runnerd.v1.SamplingParams;
import dev.runnerd.v1.ServerServiceGrpc;
import dev.runnerd.v1.StoppingParams;
import io.grpc.ManagedChannel;
import io.grpc.netty.NettyChannelBuilder;
import java.util.concurrent.TimeUnit;
import java.util.function.Predicate;
import java.util.function.UnaryOperator;

/** A connection to a running server, and what the contract tests ask of it. */
final class Server implements AutoCloseable {
  static final int PATIENCE_SECONDS = 240;

  /** More tokens than any test waits for. */
  static final int LONG = 4000;

  final ManagedChannel channel;

  private Server(ManagedChannel channel) {
    this.channel = channel;
  }

  /** The value of an environment variable; a test that needs one that is not set is skipped. */
  static String environment(String variable) {
    String value = System.getenv(variable);
    assumeNotNull(value);
    return value;
  }

  static Server at(String variable) {
    return at(variable, builder -> builder);
  }

  static Server at(String variable, UnaryOperator<NettyChannelBuilder> options) {
    NettyChannelBuilder builder = NettyChannelBuilder.forTarget(environment(variable)).usePlaintext();
    return new Server(options.apply(builder).build());
  }

  static GenerateRequest.Builder text(String prompt, int maxTokens) {
    return GenerateRequest.newBuilder()
        .setText(prompt)
        .setSampling(SamplingParams.newBuilder().setTemperature(0))
        .setStopping(StoppingParams.newBuilder().setMaxTokens(maxTokens).setIgnoreEos(true));
  }

  InferenceServiceBlockingStub stub() {
    return InferenceServiceGrpc.newBlockingStub(channel).withDeadlineAfter(PATIENCE_SECONDS, TimeUnit.SECONDS);
  }

  GetLoadResponse load() {
    return ServerServiceGrpc.newBlockingStub(channel)
        .withDeadlineAfter(PATIENCE_SECONDS, TimeUnit.SECONDS)
        .getLoad(GetLoadRequest.getDefaultInstance());
  }

  static boolean isIdle(GetLoadResponse load) {
    return load.getNumRunning() == 0 && load.getNumWaiting() == 0 && load.getNumUsedBlocks() == 0;
  }

  GetLoadResponse waitFor(Predicate<GetLoadResponse> condition) throws InterruptedException {
    long limit = System.nanoTime() + TimeUnit.SECONDS.toNanos(PATIENCE_SECONDS);
    GetLoadResponse load = load();
    while (!condition.test(load)) {
      assertTrue("the load stays " + load, System.nanoTime() < limit);
      Thread.sleep(10);
      load = load();
    }
    return load;
  }

  /** Waits until the server is idle; gives the tokens that it has generated in all. */
  long waitUntilIdle() throws InterruptedException {
    return waitFor(Server::isIdle).getGenerationTokens();
  }

  @Override
  public void close() {
    channel.shutdownNow();
  }
}
