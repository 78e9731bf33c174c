// Uses of the openai package; each prints what the Python test asserts on, as JSON.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [feature, baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none" });
const messages = [{ role: "user", content: "Name one animal." }];
const chat = { model, messages, max_tokens: 60, temperature: 0 };
const parameters = {
  type: "object",
  properties: { is_wild: { type: "boolean" } },
  required: ["is_wild"],
};

const features = {
  async chat() {
    return (await client.chat.completions.create(chat)).choices[0].message.content;
  },
  async streaming() {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...chat, stream: true }))
      text += chunk.choices[0]?.delta.content ?? "";
    return text;
  },
  async tools() {
    const tools = [{ type: "function", function: { name: "describe", parameters } }];
    const reply = await client.chat.completions.create({ ...chat, tools, tool_choice: "required" });
    return reply.choices[0].message.tool_calls[0].function;
  },
  async structured() {
    const response_format = zodResponseFormat(z.object({ is_wild: z.boolean() }), "animal");
    return (await client.chat.completions.parse({ ...chat, response_format })).choices[0].message.parsed;
  },
  async responses() {
    return (await client.responses.create({ model, input: "Hello", max_output_tokens: 16 })).output_text;
  },
  async embeddings() {
    return (await client.embeddings.create({ model, input: ["a fox", "a river"] })).data.length;
  },
};
console.log(JSON.stringify(await features[feature]()));
