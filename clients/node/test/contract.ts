// What the server promises to any client. Each test names the environment variable that holds the address of the
// server it needs; tests/clients starts them.
import assert from "node:assert/strict";
import { createInterface } from "node:readline";
import { type TestContext, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { type ChannelOptions, connectivityState, status } from "@grpc/grpc-js";
import {
  Client,
  type ConnectOptions,
  errorDetails,
  type GenerateRequest,
  type GenerationStream,
  generate,
  type OutputChunk,
  unary,
} from "../src/index.js";

const PATIENCE_MS = 240_000; // a real model on a busy machine gives a few tokens a second
const LONG = 4000; // tokens; no test waits for so many

const patience = () => ({ deadline: Date.now() + PATIENCE_MS });

function contract(name: string, variable: string, run: (address: string) => Promise<void>): void {
  const address = process.env[variable];
  const skip = address ? false : `${variable} is not set`;
  test(name, { skip, timeout: 2 * PATIENCE_MS }, async (_: TestContext) => run(address as string));
}

async function withClient(
  address: string,
  run: (client: Client) => Promise<void>,
  options?: ConnectOptions,
): Promise<void> {
  const client = new Client(address, options);
  try {
    await run(client);
  } finally {
    client.close();
  }
}

function text(prompt: string, maxTokens: number, output?: GenerateRequest["output"]): GenerateRequest {
  return { text: prompt, sampling: { temperature: 0 }, stopping: { maxTokens, ignoreEos: true }, output };
}

/** What a stream gave for output 0. */
class Answer {
  text = "";
  readonly ids: number[] = [];
  chunks = 0;
  finishes = 0;
  finish: OutputChunk["finish"] = null;

  add(chunk: OutputChunk): void {
    this.chunks++;
    this.text += chunk.text;
    this.ids.push(...chunk.tokens.map((token) => token.id));
    if (chunk.finish) {
      this.finishes++;
      this.finish = chunk.finish;
    }
  }
}

async function collect(stream: GenerationStream, answer = new Answer()): Promise<Answer> {
  for await (const chunk of stream) answer.add(chunk);
  return answer;
}

const stream = (client: Client, request: GenerateRequest) => generate(client.inference, request, patience());

async function failure(promise: Promise<unknown>): Promise<ReturnType<typeof errorDetails>> {
  try {
    await promise;
  } catch (error) {
    return errorDetails(error);
  }
  assert.fail("the call ended well");
}

const getLoad = (client: Client) => unary(client.server, "getLoad", {}, patience());
type Load = NonNullable<Awaited<ReturnType<typeof getLoad>>>;
const isIdle = (load: Load) => load.numRunning + load.numWaiting + load.numUsedBlocks === 0;

async function waitForLoad(client: Client, met: (load: Load) => boolean): Promise<Load> {
  const end = Date.now() + PATIENCE_MS;
  for (;;) {
    const load = await getLoad(client);
    if (met(load)) return load;
    assert.ok(Date.now() < end, `the load does not come to what is expected: ${JSON.stringify(load)}`);
    await sleep(10);
  }
}

/** Checks that `run` leaves the server idle before it has generated all of a long text. */
async function endsEarly(client: Client, run: () => Promise<void>): Promise<void> {
  const before = await waitForLoad(client, isIdle);
  await run();
  const after = await waitForLoad(client, isIdle);
  const tokens = Number(after.generationTokens) - Number(before.generationTokens);
  assert.ok(tokens < LONG, `${tokens} tokens were generated before the end`);
}

contract("StreamGivesWhatTheUnaryCallGives", "RUNNERD_ADDRESS", (address) =>
  withClient(address, async (client) => {
    const request = { ...text("Once upon a time", 48, { tokens: true, promptLogprobs: 0 }), requestId: "node-order" };
    const running = await stream(client, request);
    const got = new Answer();
    for await (const chunk of running) {
      assert.equal(got.finishes, 0, "a chunk came after the finish");
      got.add(chunk);
    }
    const whole = await unary(client.inference, "generate", request, patience());
    assert.deepEqual(got.ids, whole.outputs[0]?.tokens.map((token) => token.id));
    assert.equal(got.ids.length, 48);
    assert.equal(got.text, whole.outputs[0]?.text);
    assert.deepEqual([got.finishes, got.finish?.reason], [1, "FINISH_REASON_LENGTH"]);
    assert.equal(got.finish?.usage?.completionTokens, 48);
    assert.equal(running.started.requestId, "node-order");
    assert.equal(running.prompt.length, running.started.promptTokens - 1);
  }),
);

contract("UnicodeSurvivesTokenizing", "RUNNERD_ADDRESS", (address) =>
  withClient(address, async (client) => {
    const prompt = "naïve Grüße, 世界 🚀 שלום";
    const { ids } = await unary(client.inference, "tokenize", { text: prompt, addSpecialTokens: false }, patience());
    const back = await unary(client.inference, "detokenize", { ids }, patience());
    assert.equal(back.text, prompt);
  }),
);

contract("UnicodeStreamsInWholeCharacters", "RUNNERD_SCRIPTED_ADDRESS", (address) =>
  withClient(address, async (client) => {
    const script = process.env["RUNNERD_SCRIPT"] ?? "";
    const got = new Answer();
    for await (const chunk of await stream(client, { text: "x", output: { tokens: true } })) {
      got.add(chunk);
      assert.ok(!chunk.text.includes("\uFFFD") && script.startsWith(got.text), `the text so far is ${got.text}`);
    }
    assert.equal(got.text, script);
    assert.equal(got.finish?.reason, "FINISH_REASON_STOP");
    assert.equal(got.ids.length, Buffer.byteLength(script) + 1);
  }),
);

contract("LeavingAStreamFreesItsSlot", "RUNNERD_ADDRESS", (address) =>
  withClient(address, (client) =>
    endsEarly(client, async () => {
      for await (const _ of await stream(client, text("A long story: ", LONG))) {
        await waitForLoad(client, (load) => load.numRunning === 1 && load.numUsedBlocks > 0);
        break;
      }
    }),
  ),
);

contract("AbortEndsTheCall", "RUNNERD_ADDRESS", (address) =>
  withClient(address, (client) =>
    endsEarly(client, async () => {
      const running = await stream(client, text("A long story: ", LONG));
      const { requestId } = running.started;
      assert.ok((await unary(client.inference, "abort", { requestId }, patience())).aborted);
      const { code, reason } = await failure(collect(running));
      assert.deepEqual([code, reason], [status.CANCELLED, "REQUEST_ABORTED"]);
      assert.ok(!(await unary(client.inference, "abort", { requestId }, patience())).aborted);
    }),
  ),
);

contract("ADeadlineEndsTheCall", "RUNNERD_ADDRESS", (address) =>
  withClient(address, (client) =>
    endsEarly(client, async () => {
      const call = generate(client.inference, text("A long story: ", LONG), { deadline: Date.now() + 300 });
      assert.equal((await failure(call.then((running) => collect(running)))).code, status.DEADLINE_EXCEEDED);
    }),
  ),
);

contract("ARefusalNamesTheFields", "RUNNERD_ADDRESS", (address) =>
  withClient(address, async (client) => {
    const refused = await failure(stream(client, { text: "x", sampling: { temperature: -1, topP: 7 } }));
    assert.deepEqual([refused.code, refused.reason], [status.INVALID_ARGUMENT, "INVALID_REQUEST"]);
    assert.deepEqual(
      refused.fields.map(({ subject }) => subject),
      ["sampling.temperature", "sampling.top_p"],
    );
    assert.ok(refused.fields.every(({ description }) => description));
    assert.equal(refused.retryAfterMs, undefined);
    const { code, message } = errorDetails(new Error("no"));
    assert.deepEqual([code, message], [status.UNKNOWN, "no"]);
  }),
);

contract("AFullQueueNamesTheQuotaAndWhenToRetry", "RUNNERD_SMALL_ADDRESS", (address) =>
  withClient(address, async (client) => {
    const open: GenerationStream[] = [];
    for (const numWaiting of [0, 1]) {
      open.push(await stream(client, text("x", 2000)));
      await waitForLoad(client, (load) => load.numRunning === 1 && load.numWaiting === numWaiting);
    }
    const refused = await failure(stream(client, text("x", 1)));
    assert.deepEqual([refused.code, refused.reason], [status.RESOURCE_EXHAUSTED, "OVERLOADED"]);
    assert.equal(refused.quotas.length, 1);
    assert.ok(refused.quotas[0]?.subject && refused.quotas[0].description);
    assert.ok(refused.retryAfterMs !== undefined && refused.retryAfterMs > 0);
    for (const running of open) running.close();
    await waitForLoad(client, isIdle);
  }),
);

contract("ASlowReaderHoldsUpNobodyAndLosesNothing", "RUNNERD_ADDRESS", (address) =>
  withClient(address, (client) =>
    withClient(address, async (other) => {
      const running = await stream(client, text("A long story: ", 1000, { tokens: true, logprobs: 20 }));
      const got = new Answer();
      const first = await running.next();
      got.add(first.value as OutputChunk);
      // Nothing is read from here on. Another client is served meanwhile, and the generation comes to its end.
      await collect(await stream(other, text("y", 8)));
      await waitForLoad(other, isIdle);
      await collect(running, got);
      assert.deepEqual([got.ids.length, got.finishes], [1000, 1]);
      // What waited for the reader was merged: it was held back.
      assert.ok(got.chunks < 900, `1000 tokens came in ${got.chunks} chunks`);
    }),
  ),
);

contract("AHundredStreamsAtOnceKeepTheirTokensApart", "RUNNERD_ADDRESS", (address) =>
  withClient(address, async (client) => {
    const texts = await Promise.all(
      Array.from({ length: 100 }, async (_, index) => {
        const request = text(`Number ${index} is`, 16);
        const got = await collect(await stream(client, request));
        const whole = await unary(client.inference, "generate", request, patience());
        assert.equal(got.text, whole.outputs[0]?.text);
        assert.equal(got.finish?.usage?.completionTokens, 16);
        return got.text;
      }),
    );
    assert.ok(new Set(texts).size >= 10, "the prompts have the same answers");
    await waitForLoad(client, isIdle);
  }),
);

contract("HealthIsServing", "RUNNERD_ADDRESS", (address) =>
  withClient(address, async (client) => {
    for (const service of ["", "runnerd.v1.InferenceService"]) {
      assert.equal((await unary(client.health, "check", { service }, patience())).status, "SERVING");
    }
  }),
);

contract("AChannelOutlivesItsServer", "RUNNERD_RESTARTED_ADDRESS", (address) =>
  withClient(address, async (client) => {
    await collect(await stream(client, text("x", 4)));
    const running = await stream(client, text("x", 2000));
    // Whoever runs this test kills the server when it reads the line, starts it again and answers.
    console.log("restart the server");
    const lines = createInterface({ input: process.stdin });
    await new Promise((resolve) => lines.once("line", resolve));
    lines.close();
    assert.equal((await failure(collect(running))).code, status.UNAVAILABLE);
    await new Promise<void>((resolve, reject) =>
      client.inference.waitForReady(Date.now() + PATIENCE_MS, (error) => (error ? reject(error) : resolve())),
    );
    assert.equal((await collect(await stream(client, text("x", 4)))).finish?.usage?.completionTokens, 4);
  }),
);

contract("PingsEveryTenSecondsAreAccepted", "RUNNERD_PINGED_ADDRESS", (address) => {
  const channel: ChannelOptions = { "grpc.keepalive_time_ms": 10_000, "grpc.keepalive_permit_without_calls": 1 };
  const run = async (client: Client) => {
    await getLoad(client);
    const connection = client.inference.getChannel();
    const changed = await new Promise<boolean>((resolve) =>
      connection.watchConnectivityState(connectivityState.READY, Date.now() + 45_000, (error) => resolve(!error)),
    );
    assert.ok(!changed, `the connection went to ${connectivityState[connection.getConnectivityState(false)]}`);
    await getLoad(client);
  };
  return withClient(address, run, { channel });
});

contract("TLS", "RUNNERD_TLS_ADDRESS", async (address) => {
  const ca = process.env["RUNNERD_TLS_CA"] as string;
  const trusting = async (client: Client) => {
    assert.equal((await collect(await stream(client, text("x", 4)))).finish?.usage?.completionTokens, 4);
  };
  await withClient(address, trusting, { tls: { ca } });
  const distrusting = async (client: Client) => {
    const refused = await failure(stream(client, text("x", 4)));
    assert.equal(refused.code, status.UNAVAILABLE);
    assert.match(refused.message, /certificate/);
  };
  await withClient(address, distrusting, { tls: {} });
});

contract("CertificateAndTokenAreBothAskedFor", "RUNNERD_MUTUAL_TLS_ADDRESS", async (address) => {
  const variable = (name: string) => process.env[name] as string;
  const ca = variable("RUNNERD_TLS_CA");
  const tls = { ca, cert: variable("RUNNERD_CLIENT_CERT"), key: variable("RUNNERD_CLIENT_KEY") };
  const token = variable("RUNNERD_TOKEN");
  const accepted = async (client: Client) => {
    assert.equal((await collect(await stream(client, text("x", 4)))).finish?.usage?.completionTokens, 4);
  };
  const refused = (code: status) => async (client: Client) => {
    assert.equal((await failure(stream(client, text("x", 4)))).code, code);
  };
  await withClient(address, accepted, { tls, token });
  await withClient(address, refused(status.UNAUTHENTICATED), { tls });
  await withClient(address, refused(status.UNAUTHENTICATED), { tls, token: "another-token-0123456789" });
  await withClient(address, refused(status.UNAVAILABLE), { tls: { ca }, token });
});

contract("ATokenIsNotSentInPlainText", "RUNNERD_ADDRESS", async (address) => {
  assert.throws(() => new Client(address, { token: "a-token-0123456789" }), /TLS/);
});

contract("UnixSocket", "RUNNERD_UNIX_ADDRESS", (address) =>
  withClient(address, async (client) => {
    assert.equal((await collect(await stream(client, text("x", 4)))).finish?.usage?.completionTokens, 4);
  }),
);
