package dev.runnerd.examples;

import dev.runnerd.client.GenerationStream;
import dev.runnerd.v1.GenerateRequest;
import dev.runnerd.v1.GetLoadRequest;
import dev.runnerd.v1.GetLoadResponse;
import dev.runnerd.v1.InferenceServiceGrpc;
import dev.runnerd.v1.OutputChunk;
import dev.runnerd.v1.ServerServiceGrpc;
import dev.runnerd.v1.StoppingParams;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;

/** Leaves a stream after some text, and shows that the server is idle again. Argument: address. */
public final class CancelExample {
  public static void main(String[] arguments) throws InterruptedException {
    String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
    ManagedChannel channel = ManagedChannelBuilder.forTarget(address).usePlaintext().build();
    try {
      readSome(channel);
      GetLoadResponse load;
      do {
        Thread.sleep(100);
        load = ServerServiceGrpc.newBlockingStub(channel).getLoad(GetLoadRequest.getDefaultInstance());
        System.out.printf("running: %d, KV blocks in use: %d%n", load.getNumRunning(), load.getNumUsedBlocks());
      } while (load.getNumRunning() > 0 || load.getNumUsedBlocks() > 0);
    } finally {
      channel.shutdownNow();
    }
  }

  /** Returns after 40 characters; that closes the stream, and so cancels the call. */
  private static void readSome(ManagedChannel channel) {
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setText("A very long story: ")
            .setStopping(StoppingParams.newBuilder().setMaxTokens(1000).setIgnoreEos(true))
            .build();
    int length = 0;
    try (GenerationStream stream = GenerationStream.open(InferenceServiceGrpc.newBlockingStub(channel), request)) {
      for (OutputChunk chunk : stream) {
        System.out.print(chunk.getText());
        length += chunk.getText().length();
        if (length >= 40) {
          break;
        }
      }
    }
    System.out.println();
  }
}
