// Reads the scripted model with the official SDKs.

import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const host = process.argv[2];
const schema = { type: "object", properties: { command: { type: "string" } }, required: ["command"] };
const answer = [[
  { thinking: "hm" }, { text: "Hello wörld" }, { bash: "ls -l" },
  { usage: { input: 7, output: 8, cache_read: 9, cache_write: 2 } },
]];
const busy = [[{ error: { status: 529, type: "overloaded_error", times: 2 } }, { text: "ok now" }]];
const denied = [{ error: { status: 401, type: "authentication_error", times: 9 } }];
const cut = [[{ text: "before" }, { drop: 9 }, { text: "after" }]];

// The scripted model counts the failures of each prompt.
const prompt = (api, steps) => `${api}\nscript: ${JSON.stringify(steps)}`;
const openai = new OpenAI({ baseURL: `${host}/v1`, apiKey: "x" });
const anthropic = new Anthropic({ baseURL: host, apiKey: "x" });

const chat = {
  client: openai,
  options: (steps) => ({
    model: "m",
    messages: [{ role: "user", content: prompt("chat", steps) }],
    tools: [{ type: "function", function: { name: "bash", parameters: schema } }],
  }),
  plain: (client, steps) => client.chat.completions.create(chat.options(steps)),
  streamed: (client, steps) => {
    const wish = { stream: true, stream_options: { include_usage: true } };
    return client.chat.completions.stream({ ...chat.options(steps), ...wish }).finalChatCompletion();
  },
  summary: ({ choices: [{ message, finish_reason }], usage }) => {
    const call = message.tool_calls?.[0]?.function;
    return {
      text: message.content,
      call: call ? [call.name, JSON.parse(call.arguments)] : null,
      stop: finish_reason,
      tokens: [usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens],
    };
  },
};

const responses = {
  client: openai,
  options: (steps) => ({
    model: "m",
    input: prompt("responses", steps),
    tools: [{ type: "function", name: "bash", parameters: schema, strict: false }],
  }),
  plain: (client, steps) => client.responses.create(responses.options(steps)),
  streamed: (client, steps) => client.responses.stream(responses.options(steps)).finalResponse(),
  summary: ({ output_text, output, status, usage }) => {
    const call = output.find((item) => item.type === "function_call");
    return {
      text: output_text,
      call: call ? [call.name, JSON.parse(call.arguments)] : null,
      stop: status,
      tokens: [usage.input_tokens, usage.output_tokens, usage.input_tokens_details.cached_tokens],
    };
  },
};

const messages = {
  client: anthropic,
  options: (steps) => ({
    model: "m",
    max_tokens: 99,
    messages: [{ role: "user", content: prompt("messages", steps) }],
    tools: [{ name: "bash", input_schema: schema }],
  }),
  plain: (client, steps) => client.messages.create(messages.options(steps)),
  streamed: (client, steps) => client.messages.stream(messages.options(steps)).finalMessage(),
  summary: ({ content, stop_reason, usage }) => {
    const call = content.find((block) => block.type === "tool_use");
    return {
      text: content.filter((block) => block.type === "text").map((block) => block.text).join(""),
      call: call ? [call.name, call.input] : null,
      stop: stop_reason,
      tokens: [usage.input_tokens, usage.output_tokens, usage.cache_read_input_tokens],
    };
  },
};

async function failure(promise) {
  try {
    await promise;
    return null;
  } catch (error) {
    return error.constructor.name;
  }
}

async function check(api) {
  const once = api.client.withOptions({ maxRetries: 0 });
  const whole = api.summary(await api.streamed(api.client, answer));
  const plain = api.summary(await api.plain(api.client, answer));
  if (JSON.stringify(whole) !== JSON.stringify(plain)) throw new Error(JSON.stringify({ whole, plain }));
  const models = [];
  for await (const model of api.client.models.list()) models.push(model.id);
  return {
    answer: whole,
    retried: await failure(api.streamed(api.client.withOptions({ maxRetries: 2 }), busy)),
    denied: await failure(api.streamed(once, denied)),
    cut: (await failure(api.streamed(once, cut))) !== null,
    models,
    model: (await api.client.models.retrieve("scripted")).id,
  };
}

// All at once: the SDKs wait between attempts.
const apis = Object.entries({ chat, responses, messages });
const checked = await Promise.all(apis.map(async ([name, api]) => [name, await check(api)]));
console.log(JSON.stringify(Object.fromEntries(checked)));
