// Asks for what is refused, and prints what the server says about it: node dist/examples/errors.js ADDRESS
import { status } from "@grpc/grpc-js";
import { Client, errorDetails, generate } from "../src/index.js";

const client = new Client(process.argv[2] ?? "127.0.0.1:50051");
try {
  await generate(client.inference, { text: "Hello", sampling: { temperature: -1, topP: 7 } });
} catch (error) {
  const details = errorDetails(error);
  console.log(status[details.code], details.reason);
  for (const { subject, description } of details.fields) console.log(`  ${subject}: ${description}`);
  for (const { subject, description } of details.quotas) console.log(`  quota ${subject}: ${description}`);
  if (details.retryAfterMs !== undefined) console.log(`  try again in ${details.retryAfterMs} ms`);
}
client.close();
