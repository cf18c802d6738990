// Prints an answer as it grows: node dist/examples/stream.js ADDRESS [PROMPT]
import { Client, generate } from "../src/index.js";

const [address = "127.0.0.1:50051", ...words] = process.argv.slice(2);
const client = new Client(address);
const request = { text: words.join(" ") || "The capital of France is", stopping: { maxTokens: 64 } };
for await (const chunk of await generate(client.inference, request)) {
  process.stdout.write(chunk.text);
  if (chunk.finish) console.log(`\n[${chunk.finish.reason}, ${chunk.finish.usage?.completionTokens} tokens]`);
}
client.close();
