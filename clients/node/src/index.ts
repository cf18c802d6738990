export { Client, type ConnectOptions, type Tls, unary } from "./client.js";
export { type ErrorDetails, errorDetails, type Violation } from "./errors.js";
export { GenerationStream, generate } from "./stream.js";
export type { GenerateRequest } from "./generated/runnerd/v1/GenerateRequest.js";
export type { GenerateResponse__Output as GenerateResponse } from "./generated/runnerd/v1/GenerateResponse.js";
export type { OutputChunk__Output as OutputChunk } from "./generated/runnerd/v1/OutputChunk.js";
export type { Token__Output as Token } from "./generated/runnerd/v1/Token.js";
