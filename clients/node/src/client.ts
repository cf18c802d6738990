import { readFileSync } from "node:fs";
import * as grpc from "@grpc/grpc-js";
import type { HealthClient } from "./generated/grpc/health/v1/Health.js";
import type { InferenceServiceClient } from "./generated/runnerd/v1/InferenceService.js";
import type { ModelServiceClient } from "./generated/runnerd/v1/ModelService.js";
import type { ServerServiceClient } from "./generated/runnerd/v1/ServerService.js";
import { Health, InferenceService, ModelService, ServerService } from "./protos.js";

/** TLS to a server; paths are of PEM files. */
export interface Tls {
  /** Who signed the server's certificate; default: the authorities that Node trusts. */
  ca?: string;
  /** This client's certificate and its key, where the server asks for one. */
  cert?: string;
  key?: string;
}

/** How to reach a server. */
export interface ConnectOptions {
  /** Default: no TLS. */
  tls?: Tls;
  /** Bearer token; sent over TLS alone. */
  token?: string;
  /** Further options of the channel. */
  channel?: grpc.ChannelOptions;
}

/** The stubs of a server's services, over one connection. */
export class Client {
  readonly inference: InferenceServiceClient;
  readonly model: ModelServiceClient;
  readonly server: ServerServiceClient;
  readonly health: HealthClient;

  /** The address is "host:port" or "unix:/path". */
  constructor(address: string, options: ConnectOptions = {}) {
    const credentials = channelCredentials(options);
    const channel: grpc.ChannelOptions = {
      "grpc.max_receive_message_length": -1, // log-probabilities of a long prompt exceed the default of 4 MiB
      "grpc.keepalive_time_ms": 30_000, // notices a server that vanished while a stream waits for its next token
      "grpc.keepalive_timeout_ms": 10_000,
      ...options.channel,
    };
    this.inference = new InferenceService(address, credentials, channel);
    const shared = { channelOverride: this.inference.getChannel() };
    this.model = new ModelService(address, credentials, shared);
    this.server = new ServerService(address, credentials, shared);
    this.health = new Health(address, credentials, shared);
  }

  /** Closes the connection; calls that still run go on to their end. */
  close(): void {
    this.inference.close();
  }
}

function channelCredentials({ tls, token }: ConnectOptions): grpc.ChannelCredentials {
  if (tls === undefined) {
    if (token !== undefined) throw new Error("a token is sent over TLS alone: give tls");
    return grpc.credentials.createInsecure();
  }
  if ((tls.cert === undefined) !== (tls.key === undefined)) throw new Error("cert and key go together");
  const read = (path?: string) => (path === undefined ? null : readFileSync(path));
  const encrypted = grpc.credentials.createSsl(read(tls.ca), read(tls.key), read(tls.cert));
  if (token === undefined) return encrypted;
  const bearer = grpc.credentials.createFromMetadataGenerator((_, callback) => {
    const metadata = new grpc.Metadata();
    metadata.set("authorization", `Bearer ${token}`);
    callback(null, metadata);
  });
  return grpc.credentials.combineChannelCredentials(encrypted, bearer);
}

type Unary<Request, Response> = (
  request: Request,
  callback: grpc.requestCallback<Response>,
) => grpc.ClientUnaryCall;
type RequestOf<Method> = Method extends Unary<infer Request, infer _> ? Request : never;
type ResponseOf<Method> = Method extends Unary<infer _, infer Response> ? Response : never;

/** Calls a method that answers once: `await unary(client.server, "getLoad", {})`. What it throws, errorDetails reads. */
export function unary<Stub extends grpc.Client, Name extends keyof Stub>(
  stub: Stub,
  name: Name,
  request: RequestOf<Stub[Name]>,
  options: grpc.CallOptions = {},
): Promise<ResponseOf<Stub[Name]>> {
  type Response = ResponseOf<Stub[Name]>;
  type Call = (request: object, options: grpc.CallOptions, callback: grpc.requestCallback<Response>) => void;
  return new Promise((resolve, reject) => {
    (stub[name] as Call).call(stub, request as object, options, (error, response) => {
      if (error) reject(error);
      else resolve(response as Response);
    });
  });
}
