package dev.runnerd.examples;

import dev.runnerd.client.ErrorDetails;
import dev.runnerd.v1.GenerateRequest;
import dev.runnerd.v1.InferenceServiceGrpc;
import dev.runnerd.v1.SamplingParams;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;

/** Asks for what is refused, and prints what the server says about it. Argument: address. */
public final class ErrorDetailsExample {
  public static void main(String[] arguments) {
    String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
    ManagedChannel channel = ManagedChannelBuilder.forTarget(address).usePlaintext().build();
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setText("Hello")
            .setSampling(SamplingParams.newBuilder().setTemperature(-1).setTopP(7))
            .build();
    try {
      InferenceServiceGrpc.newBlockingStub(channel).generate(request);
    } catch (StatusRuntimeException error) {
      ErrorDetails details = ErrorDetails.of(error);
      System.out.println(details.code() + " " + details.reason());
      details.fields().forEach(one -> System.out.printf("  %s: %s%n", one.subject(), one.description()));
      details.quotas().forEach(one -> System.out.printf("  quota %s: %s%n", one.subject(), one.description()));
      details.retryAfter().ifPresent(delay -> System.out.println("  try again in " + delay));
    } finally {
      channel.shutdownNow();
    }
  }
}
