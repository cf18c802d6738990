// Prints the outcome of each test on a line of its own, for tests/clients to read.
import type { TestEvent } from "node:test/reporters";

export default async function* report(events: AsyncIterable<TestEvent>): AsyncGenerator<string> {
  for await (const { type, data } of events) {
    if (type === "test:pass") yield `--- ${data.skip === undefined ? "PASS" : "SKIP"}: ${data.name}\n`;
    if (type === "test:fail") yield `--- FAIL: ${data.name}\n${data.details.error.stack}\n${data.details.error.cause}\n`;
  }
}
