package dev.runnerd.examples;

import dev.runnerd.v1.GetModelInfoRequest;
import dev.runnerd.v1.GetModelInfoResponse;
import dev.runnerd.v1.ModelServiceGrpc;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthCheckResponse;
import io.grpc.health.v1.HealthGrpc;

/** Asks whether generations are served, and what serves them. Argument: address. */
public final class HealthExample {
  public static void main(String[] arguments) {
    String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
    ManagedChannel channel = ManagedChannelBuilder.forTarget(address).usePlaintext().build();
    try {
      HealthCheckResponse health =
          HealthGrpc.newBlockingStub(channel)
              .check(HealthCheckRequest.newBuilder().setService("runnerd.v1.InferenceService").build());
      System.out.println(health.getStatus());
      if (health.getStatus() == HealthCheckResponse.ServingStatus.SERVING) {
        GetModelInfoResponse model =
            ModelServiceGrpc.newBlockingStub(channel).getModelInfo(GetModelInfoRequest.getDefaultInstance());
        System.out.printf(
            "%s: %s, up to %d tokens%n", model.getName(), model.getArchitecture(), model.getMaxModelLen());
      }
    } finally {
      channel.shutdownNow();
    }
  }
}
