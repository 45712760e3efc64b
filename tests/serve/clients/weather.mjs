// Vercel's AI SDK with a tool, whole and streamed, and an object of a schema.
// Source: ai-sdk.dev/docs/ai-sdk-core/tools-and-tool-calling and ai-sdk.dev/providers/openai-compatible-providers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";

const [baseURL, apiKey, name, prompt, found] = process.argv.slice(2);
const { generateText, Output, streamText, tool } = ai;
const steps = ai.isStepCount ?? ai.stepCountIs; // its name until version 7
const provider = createOpenAICompatible({
  name: "ragblend", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const get_weather = tool({
  description: "The weather of a city.", inputSchema: z.object({ city: z.string() }), execute: async () => found });
const asked = { model: provider(name), tools: { get_weather }, stopWhen: steps(4), prompt };

const whole = await generateText(asked);
const stream = streamText(asked);
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;
const place = await generateText({
  model: provider(name), prompt: "Name a city.", output: Output.object({ schema: z.object({ city: z.string() }) }) });
console.log(JSON.stringify({
  whole: whole.text, steps: whole.steps.length, streamed, tokens: (await stream.totalUsage).outputTokens,
  place: place.output }));
