package dev.runnerd.examples;

import dev.runnerd.client.GenerationStream;
import dev.runnerd.v1.GenerateRequest;
import dev.runnerd.v1.InferenceServiceGrpc;
import dev.runnerd.v1.OutputChunk;
import dev.runnerd.v1.StoppingParams;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;

/** Prints an answer as it grows. Arguments: address, prompt. */
public final class StreamExample {
  public static void main(String[] arguments) {
    String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
    String prompt = arguments.length > 1 ? arguments[1] : "The capital of France is";
    ManagedChannel channel = ManagedChannelBuilder.forTarget(address).usePlaintext().build();
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setText(prompt)
            .setStopping(StoppingParams.newBuilder().setMaxTokens(64))
            .build();
    try (GenerationStream stream = GenerationStream.open(InferenceServiceGrpc.newBlockingStub(channel), request)) {
      for (OutputChunk chunk : stream) {
        System.out.print(chunk.getText());
        if (chunk.hasFinish()) {
          System.out.printf(
              "%n[%s, %d tokens]%n",
              chunk.getFinish().getReason(), chunk.getFinish().getUsage().getCompletionTokens());
        }
      }
    } finally {
      channel.shutdownNow();
    }
  }
}
