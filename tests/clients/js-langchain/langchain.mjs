// Uses of LangChain.js; each prints what the Python test asserts on, as JSON.
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { createAgent } from "langchain";
import { z } from "zod";

const [feature, baseURL, model] = process.argv.slice(2);
const configuration = { baseURL, apiKey: "none" };
const options = { model, apiKey: "none", configuration, maxTokens: 60, temperature: 0, maxRetries: 0 };
const llm = new ChatOpenAI(options);
const animal = z.object({ is_wild: z.boolean() });
const describe = tool(({ is_wild }) => String(is_wild), {
  name: "describe",
  description: "Describe an animal.",
  schema: animal,
});

const features = {
  async chat() {
    return (await llm.invoke("Name one animal.")).content;
  },
  async streaming() {
    let text = "";
    for await (const chunk of await llm.stream("Name one animal.")) text += chunk.content;
    return text;
  },
  async tools() {
    const bound = llm.bindTools([describe], { tool_choice: "required" });
    return (await bound.invoke("A wolf.")).tool_calls[0];
  },
  async structured() {
    return await llm.withStructuredOutput(animal, { method: "jsonSchema" }).invoke("A wolf.");
  },
  async agents() {
    const agent = createAgent({ model: llm, tools: [describe] });
    const { messages } = await agent.invoke({ messages: [{ role: "user", content: "A wolf." }] }, { recursionLimit: 60 });
    return messages.length;
  },
  async embeddings() {
    const embeddings = new OpenAIEmbeddings(options);
    return (await embeddings.embedDocuments(["a fox", "a river"])).length;
  },
};
console.log(JSON.stringify(await features[feature]()));
