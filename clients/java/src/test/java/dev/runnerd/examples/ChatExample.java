package dev.runnerd.examples;

import dev.runnerd.client.GenerationStream;
import dev.runnerd.v1.ChatMessage;
import dev.runnerd.v1.ChatPrompt;
import dev.runnerd.v1.GenerateRequest;
import dev.runnerd.v1.InferenceServiceGrpc;
import dev.runnerd.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.runnerd.v1.OutputChunk;
import dev.runnerd.v1.StoppingParams;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import java.nio.charset.StandardCharsets;
import java.util.Scanner;

/** Holds a conversation: a line in, an answer out, until the input ends. Argument: address. */
public final class ChatExample {
  public static void main(String[] arguments) {
    String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
    ManagedChannel channel = ManagedChannelBuilder.forTarget(address).usePlaintext().build();
    InferenceServiceBlockingStub stub = InferenceServiceGrpc.newBlockingStub(channel);
    ChatPrompt.Builder conversation = ChatPrompt.newBuilder();
    try (Scanner lines = new Scanner(System.in, StandardCharsets.UTF_8)) {
      while (lines.hasNextLine()) {
        conversation.addMessages(ChatMessage.newBuilder().setRole("user").setContent(lines.nextLine()));
        String answer = say(stub, conversation.build());
        conversation.addMessages(ChatMessage.newBuilder().setRole("assistant").setContent(answer));
      }
    } finally {
      channel.shutdownNow();
    }
  }

  /** Prints the answer as it grows, and returns it. */
  private static String say(InferenceServiceBlockingStub stub, ChatPrompt conversation) {
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setChat(conversation)
            .setStopping(StoppingParams.newBuilder().setMaxTokens(256))
            .build();
    StringBuilder answer = new StringBuilder();
    try (GenerationStream stream = GenerationStream.open(stub, request)) {
      for (OutputChunk chunk : stream) {
        System.out.print(chunk.getText());
        answer.append(chunk.getText());
      }
    }
    System.out.println();
    return answer.toString();
  }
}
