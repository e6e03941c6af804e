// Vercel's AI SDK with its provider for OpenAI-compatible servers: reasoning, tools over several steps, an object.
"use strict";
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { generateObject, generateText, isStepCount, streamText, tool } = require("ai");
const { z } = require("zod");

const [url, name] = process.argv.slice(2);
const stopWhen = isStepCount(4);
const asked = [];
const bodies = [];
const provider = createOpenAICompatible({
  name: "diptych",
  baseURL: `${url}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
  fetch: (input, init) => {
    bodies.push(JSON.parse(init.body));
    return fetch(input, init);
  },
});
const tools = {
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      asked.push(city);
      return "18 degrees and sunny";
    },
  }),
};
const told = { reasoning: "text", text: "text", "tool-call": "input" };
const parts = (steps) =>
  steps.map(({ content }) => content.filter(({ type }) => type in told).map((part) => [part.type, part[told[part.type]]]));

async function ask(opensThought) {
  const settings = {
    model: provider(name),
    maxRetries: 0,
    temperature: 0,
    providerOptions: { diptych: { reasoningEffort: "medium", chat_template_kwargs: { opens_thought: opensThought } } },
  };
  const question = { ...settings, tools, stopWhen, prompt: "What is the weather in Paris?" };
  const hello = await generateText({ ...settings, prompt: "Hello" });
  const generated = await generateText(question);
  const sent = bodies.at(-1).messages.find(({ role }) => role === "assistant");
  const stream = streamText(question);
  await stream.consumeStream();
  const schema = z.object({ city: z.literal("Paris"), degrees: z.literal(18) });
  const found = await generateObject({ ...settings, schema, prompt: "Hello" });
  return {
    said: [hello.text, hello.reasoningText, hello.usage.outputTokenDetails.reasoningTokens],
    generated: parts(generated.steps),
    streamed: parts(await stream.steps),
    object: [found.object, found.reasoning],
    sent_back: sent.reasoning_content === generated.steps[0].reasoningText,
  };
}

(async () => {
  const written = await ask(false);
  const opened = await ask(true);
  console.log(JSON.stringify({ written, opened, asked }));
})();
