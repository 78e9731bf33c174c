// Run an agent with a tool and a schema; print its steps as JSON.
// node agent.mjs BASE_URL MODEL chat|responses|compatible generate|stream
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, id, api, mode] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "weft",
  baseURL,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const model = { chat: () => openai.chat(id), responses: () => openai.responses(id), compatible: () => compatible(id) };
const options = {
  model: model[api](),
  prompt: "Is it sunny in Rome?",
  temperature: 0,
  maxOutputTokens: 80,
  maxRetries: 0,
  stopWhen: stepCountIs(3),
  tools: {
    weather: tool({
      description: "Return the weather of a city.",
      inputSchema: z.object({ city: z.string().max(20) }),
      execute: async ({ city }) => `The sky of ${city} is clear.`,
    }),
  },
  output: Output.object({ schema: z.object({ clear: z.boolean() }) }),
};
let result;
if (mode === "stream") {
  result = streamText({ ...options, onError: ({ error }) => { throw error; } });
  await result.consumeStream();
} else {
  result = await generateText(options);
}
const steps = await result.steps;
const calls = steps.flatMap((step) => step.toolCalls).map(({ toolName, input }) => ({ toolName, input }));
const ended = steps.at(-1).toolCalls.length === 0;
console.log(JSON.stringify({ calls, output: ended ? await result.output : null }));
