// Asks whether generations are served, and what serves them: node dist/examples/health.js ADDRESS
import { Client, unary } from "../src/index.js";

const client = new Client(process.argv[2] ?? "127.0.0.1:50051");
const health = await unary(client.health, "check", { service: "runnerd.v1.InferenceService" });
console.log(health?.status);
const model = await unary(client.model, "getModelInfo", {});
console.log(`${model?.name}: ${model?.architecture}, up to ${model?.maxModelLen} tokens`);
client.close();
if (health?.status !== "SERVING") process.exitCode = 1;
