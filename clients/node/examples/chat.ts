// Holds a conversation, a line in and an answer out, until the input ends: node dist/examples/chat.js ADDRESS
import { createInterface } from "node:readline";
import { Client, generate } from "../src/index.js";

const client = new Client(process.argv[2] ?? "127.0.0.1:50051");
const messages: { role: string; content: string }[] = [];
for await (const line of createInterface({ input: process.stdin })) {
  messages.push({ role: "user", content: line });
  let answer = "";
  for await (const chunk of await generate(client.inference, { chat: { messages }, stopping: { maxTokens: 256 } })) {
    process.stdout.write(chunk.text);
    answer += chunk.text;
  }
  console.log();
  messages.push({ role: "assistant", content: answer });
}
client.close();
