// Streams one answer with a tool loop from the server at argv[2] through the Vercel AI SDK, and prints what came as
// one line of JSON. See ../ai_sdk_client.py, which starts the server and judges the line.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const [url, model] = process.argv.slice(2)
const lily = createOpenAICompatible({ name: 'lily', baseURL: url, apiKey: 'none', includeUsage: true })

const cities = []
const tools = {
  get_weather: tool({
    description: 'Get the current weather in a city.',
    inputSchema: z.object({ city: z.string().describe('The city.') }),
    execute: async ({ city }) => {
      cities.push(city)
      return { temperature: 21 }
    },
  }),
}

const parts = []
const result = streamText({
  model: lily(model),
  prompt: 'What is the weather in Rome?',
  tools,
  stopWhen: stepCountIs(4),
  maxOutputTokens: 200,
  onError: ({ error }) => {
    throw error
  },
})
for await (const part of result.fullStream) parts.push(part.type)
const steps = await result.steps
console.log(
  JSON.stringify({
    cities,
    parts,
    text: await result.text,
    finishes: steps.map((step) => step.finishReason),
    usage: await result.totalUsage,
  }),
)
