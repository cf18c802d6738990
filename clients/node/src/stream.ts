import type { CallOptions } from "@grpc/grpc-js";
import * as grpc from "@grpc/grpc-js";
import type { GenerateRequest } from "./generated/runnerd/v1/GenerateRequest.js";
import type { InferenceServiceClient } from "./generated/runnerd/v1/InferenceService.js";
import type { OutputChunk__Output } from "./generated/runnerd/v1/OutputChunk.js";
import type { Started__Output } from "./generated/runnerd/v1/Started.js";
import type { StreamGenerateResponse__Output } from "./generated/runnerd/v1/StreamGenerateResponse.js";
import type { Token__Output } from "./generated/runnerd/v1/Token.js";

/**
 * A running generation: iterate over its chunks. Leaving the loop in any way cancels the call, and so does close().
 * Chunks of different outputs interleave: see their index.
 *
 *     for await (const chunk of await generate(client.inference, request)) process.stdout.write(chunk.text);
 */
export class GenerationStream implements AsyncIterableIterator<OutputChunk__Output> {
  /** Records of the prompt's tokens, once the first chunk has come, when promptLogprobs were asked for. */
  prompt: Token__Output[] = [];

  constructor(
    private readonly call: grpc.ClientReadableStream<StreamGenerateResponse__Output>,
    private readonly messages: AsyncIterator<StreamGenerateResponse__Output>,
    /** The request's id, seed and number of prompt tokens. */
    readonly started: Started__Output,
  ) {}

  [Symbol.asyncIterator](): this {
    return this;
  }

  async next(): Promise<IteratorResult<OutputChunk__Output>> {
    for (;;) {
      const { done, value } = await this.messages.next();
      if (done) return { done: true, value: undefined };
      if (value.output) return { done: false, value: value.output };
      if (value.prompt) this.prompt = value.prompt.tokens;
    }
  }

  async return(): Promise<IteratorResult<OutputChunk__Output>> {
    this.close();
    return { done: true, value: undefined };
  }

  /** Cancels the call if it has not ended, so that the server stops generating. It may be called again. */
  close(): void {
    this.call.cancel();
  }
}

/**
 * Starts a streamed generation and waits until the server has accepted it. What it and the stream throw, errorDetails
 * reads. Messages are read as they are asked for: a slow reader holds the server back, and fills no memory here.
 */
export async function generate(
  inference: InferenceServiceClient,
  request: GenerateRequest,
  options: CallOptions = {},
): Promise<GenerationStream> {
  const call = inference.streamGenerate(request, new grpc.Metadata(), options);
  // An error that comes while nobody waits for a message is given to whoever asks next.
  call.on("error", () => {});
  const messages = call[Symbol.asyncIterator]() as AsyncIterator<StreamGenerateResponse__Output>;
  const first = await messages.next();
  if (first.done || !first.value.started) {
    call.cancel();
    throw new Error("the first message of the stream is not Started");
  }
  return new GenerationStream(call, messages, first.value.started);
}
