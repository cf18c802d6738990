import * as grpc from "@grpc/grpc-js";
import type { BadRequest__Output } from "./generated/google/rpc/BadRequest.js";
import type { ErrorInfo__Output } from "./generated/google/rpc/ErrorInfo.js";
import type { QuotaFailure__Output } from "./generated/google/rpc/QuotaFailure.js";
import type { RetryInfo__Output } from "./generated/google/rpc/RetryInfo.js";
import type { Status__Output } from "./generated/google/rpc/Status.js";
import { decode } from "./protos.js";

/** What is wrong with a field of the request ("sampling.top_p"), or which quota is used up. */
export interface Violation {
  subject: string;
  description: string;
}

/** What the server says about a failed call. */
export interface ErrorDetails {
  /** UNKNOWN for an error that is not gRPC's. */
  code: grpc.status;
  /** For people. */
  message: string;
  /** The server's stable name of the error, such as "INVALID_REQUEST"; empty when it gave none. */
  reason: string;
  /** The wrong fields, with INVALID_ARGUMENT. */
  fields: Violation[];
  /** The quotas that are used up, with RESOURCE_EXHAUSTED. */
  quotas: Violation[];
  /** Milliseconds after which to try again, when the server says so. */
  retryAfterMs?: number;
}

/** Reads the details of an error that a call or a stream threw. */
export function errorDetails(error: unknown): ErrorDetails {
  const details: ErrorDetails = {
    code: grpc.status.UNKNOWN,
    message: error instanceof Error ? error.message : String(error),
    reason: "",
    fields: [],
    quotas: [],
  };
  if (!isServiceError(error)) return details;
  details.code = error.code;
  details.message = error.details;
  for (const [name, bytes] of packedDetails(error)) {
    if (name === "google.rpc.ErrorInfo") {
      details.reason = decode<ErrorInfo__Output>(name, bytes)?.reason ?? "";
    } else if (name === "google.rpc.BadRequest") {
      const found = decode<BadRequest__Output>(name, bytes)?.fieldViolations ?? [];
      details.fields = found.map(({ field, description }) => ({ subject: field, description }));
    } else if (name === "google.rpc.QuotaFailure") {
      const found = decode<QuotaFailure__Output>(name, bytes)?.violations ?? [];
      details.quotas = found.map(({ subject, description }) => ({ subject, description }));
    } else if (name === "google.rpc.RetryInfo") {
      const delay = decode<RetryInfo__Output>(name, bytes)?.retryDelay;
      if (delay) details.retryAfterMs = Number(delay.seconds) * 1e3 + delay.nanos / 1e6;
    }
  }
  return details;
}

function isServiceError(error: unknown): error is grpc.ServiceError {
  return error instanceof Error && "code" in error && "details" in error && "metadata" in error;
}

function packedDetails(error: grpc.ServiceError): [string, Uint8Array][] {
  const [status] = error.metadata.get("grpc-status-details-bin");
  if (!(status instanceof Uint8Array)) return [];
  const details = decode<Status__Output>("google.rpc.Status", status)?.details ?? [];
  // An Any that proto-loader knows no type of keeps its name and its bytes.
  return details.map((any) => {
    const { type_url, value } = any as unknown as { type_url: string; value: Uint8Array };
    return [type_url.slice(type_url.lastIndexOf("/") + 1), value];
  });
}
