package dev.runnerd.examples;

import com.google.protobuf.Duration;
import dev.runnerd.client.ErrorDetails;
import dev.runnerd.v1.Finish;
import dev.runnerd.v1.GenerateRequest;
import dev.runnerd.v1.InferenceServiceGrpc;
import dev.runnerd.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.runnerd.v1.StoppingParams;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import java.util.concurrent.TimeUnit;

/** Gives a generation half a second: once the call's (an error), once its own (an early end). Argument: address. */
public final class DeadlineExample {
  private static final int LIMIT_MILLISECONDS = 500;

  public static void main(String[] arguments) {
    String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
    ManagedChannel channel = ManagedChannelBuilder.forTarget(address).usePlaintext().build();
    InferenceServiceBlockingStub stub = InferenceServiceGrpc.newBlockingStub(channel);
    StoppingParams stopping = StoppingParams.newBuilder().setMaxTokens(1000).setIgnoreEos(true).build();
    GenerateRequest request =
        GenerateRequest.newBuilder().setText("A very long story: ").setStopping(stopping).build();
    try {
      try {
        stub.withDeadlineAfter(LIMIT_MILLISECONDS, TimeUnit.MILLISECONDS).generate(request);
        System.out.println("the call's deadline: done in time");
      } catch (StatusRuntimeException error) {
        System.out.println("the call's deadline: " + ErrorDetails.of(error).code());
      }
      Duration limit = Duration.newBuilder().setNanos(LIMIT_MILLISECONDS * 1_000_000).build();
      GenerateRequest limited = request.toBuilder().setStopping(stopping.toBuilder().setTimeLimit(limit)).build();
      Finish finish = stub.generate(limited).getOutputs(0).getFinish();
      System.out.printf(
          "stopping.time_limit: %s after %d tokens%n",
          finish.getReason(), finish.getUsage().getCompletionTokens());
    } finally {
      channel.shutdownNow();
    }
  }
}
