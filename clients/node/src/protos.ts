// The services and messages, from the .proto files that lie beside the compiled code.
import { fileURLToPath } from "node:url";
import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";
import type { ProtoGrpcType as HealthPackage } from "./generated/health.js";
import type { ProtoGrpcType as Inference } from "./generated/inference.js";
import type { ProtoGrpcType as Server } from "./generated/server.js";

const definition = loader.loadSync(
  [
    "runnerd/v1/inference.proto",
    "runnerd/v1/server.proto",
    "google/rpc/details.proto",
    "grpc/health/v1/health.proto",
  ],
  {
    includeDirs: [fileURLToPath(new URL("../protos", import.meta.url))],
    longs: String, // seeds need 64 bits, and a number has 53
    enums: String,
    defaults: true,
    oneofs: true,
  },
);

const loaded = grpc.loadPackageDefinition(definition) as unknown as Inference & Server & HealthPackage;

export const { InferenceService, ModelService, ServerService } = loaded.runnerd.v1;
export const { Health } = loaded.grpc.health.v1;

/** Reads a message from its wire form; T is the type that is generated for the message of that name. */
export function decode<T>(name: string, bytes: Uint8Array): T | undefined {
  const found = definition[name] as loader.MessageTypeDefinition<object, object> | undefined;
  return found?.deserialize(Buffer.from(bytes)) as T | undefined;
}
