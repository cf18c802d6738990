// Gives a generation half a second: once the call's (an error), once the request's own (an early end).
// node dist/examples/deadline.js ADDRESS
import { status } from "@grpc/grpc-js";
import { Client, errorDetails, unary } from "../src/index.js";

const client = new Client(process.argv[2] ?? "127.0.0.1:50051");
const text = "A very long story: ";
const stopping = { maxTokens: 1000, ignoreEos: true };
try {
  await unary(client.inference, "generate", { text, stopping }, { deadline: Date.now() + 500 });
  console.log("the call's deadline: done in time");
} catch (error) {
  console.log("the call's deadline:", status[errorDetails(error).code]);
}
const timeLimit = { nanos: 500_000_000 };
const answer = await unary(client.inference, "generate", { text, stopping: { ...stopping, timeLimit } });
const finish = answer?.outputs[0]?.finish;
console.log(`stopping.time_limit: ${finish?.reason} after ${finish?.usage?.completionTokens} tokens`);
client.close();
