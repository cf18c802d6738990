// Leaves a stream after some text, and shows that the server is idle again: node dist/examples/cancel.js ADDRESS
import { setTimeout as sleep } from "node:timers/promises";
import { Client, generate, unary } from "../src/index.js";

const client = new Client(process.argv[2] ?? "127.0.0.1:50051");
const request = { text: "A very long story: ", stopping: { maxTokens: 1000, ignoreEos: true } };
let text = "";
for await (const chunk of await generate(client.inference, request)) {
  text += chunk.text;
  if (text.length >= 40) break; // leaving the loop cancels the call
}
console.log(text);
for (;;) {
  const load = await unary(client.server, "getLoad", {});
  console.log(`running: ${load.numRunning}, KV blocks in use: ${load.numUsedBlocks}`);
  if (load.numRunning === 0 && load.numUsedBlocks === 0) break;
  await sleep(100);
}
client.close();
