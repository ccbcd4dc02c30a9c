// Checks recorded answers against GitHub's descriptions. Reads one JSON object a line: `method`,
// `path`, `status`, `body` of an answer, or `event`, `payload` of a webhook. Prints how often each
// operation was answered with which status; complains and fails when one does not conform.
import fs from "node:fs";
import readline from "node:readline";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const Ajv = require("ajv/dist/2020.js").default;
const addFormats = require("ajv-formats").default;

// OpenAPI 3.0 writes `nullable`, which JSON Schema lacks.
function withNull(schema) {
  if (Array.isArray(schema)) return schema.map(withNull);
  if (schema === null || typeof schema !== "object") return schema;
  const copy = {};
  for (const [key, value] of Object.entries(schema)) {
    copy[key] = ["enum", "example", "examples", "default"].includes(key) ? value : withNull(value);
  }
  if (copy.nullable !== true) return copy;
  delete copy.nullable;
  return { anyOf: [{ type: "null" }, copy] };
}

function load(file, id) {
  const document = withNull(JSON.parse(fs.readFileSync(`node_modules/@octokit/${file}`)));
  const ajv = new Ajv({ strict: false, allErrors: true, validateFormats: true });
  addFormats(ajv);
  ajv.addSchema(document, id);
  const compiled = new Map();
  const validator = (pointer) => {
    if (!compiled.has(pointer)) compiled.set(pointer, ajv.compile({ $ref: `${id}#${pointer}` }));
    return compiled.get(pointer);
  };
  return { document, validator };
}

const escape = (part) => encodeURIComponent(part.replaceAll("~", "~0").replaceAll("/", "~1"));

// Parameters that may have slashes.
const MANY = /\{(ref|basehead|branch|path)\}/g;

function routes(document) {
  return Object.keys(document.paths).map((template) => {
    const source = template.replaceAll(/[.*+?^$()|[\]\\]/g, "\\$&");
    const greedy = template.startsWith("/repos/") && !template.includes("/branches/{branch}/");
    const pattern = (greedy ? source.replaceAll(MANY, ".*") : source).replaceAll(/\{\w+\}/g, "[^/]+");
    const literal = template.split("/").filter((part) => !part.includes("{")).length;
    return { template, pattern: new RegExp(`^${pattern}$`), literal };
  }).sort((one, other) => other.literal - one.literal);
}

const api = load("openapi/generated/api.github.com.json", "https://github.test/api");
const hooks = load("openapi-webhooks/generated/api.github.com.json", "https://github.test/hooks");
const known = routes(api.document);
const counts = {};
const problems = [];

function describe(name, validate) {
  const errors = validate.errors.slice(0, 12).map((error) => `  ${error.instancePath || "/"}: ${error.message} ${JSON.stringify(error.params)}`);
  problems.push(`${name}\n${errors.join("\n")}`);
}

function checkAnswer({ method, path, status, body }) {
  const plain = path.split("?")[0].replace(/\/$/, "").replace(/\/contents$/, "/contents/") || "/";
  const route = known.find((route) => route.pattern.test(plain) && api.document.paths[route.template][method.toLowerCase()]);
  if (!route) {
    problems.push(`${method} ${path}: GitHub has no such route`);
    return;
  }
  const name = `${method} ${route.template} ${status}`;
  counts[name] = (counts[name] ?? 0) + 1;
  // An error that the description leaves out has the form of all errors.
  if (status === 401 || (status >= 400 && !api.document.paths[route.template][method.toLowerCase()].responses[status])) {
    const validate = api.validator("/components/schemas/basic-error");
    if (!validate(body) || typeof body.message !== "string") describe(`${name} (${path})`, validate);
    return;
  }
  let pointer = `/paths/${escape(route.template)}/${method.toLowerCase()}/responses/${status}`;
  let response = api.document.paths[route.template][method.toLowerCase()].responses[status];
  if (!response) {
    problems.push(`${name} (${path}): GitHub never answers with ${status}`);
    return;
  }
  if (response.$ref) {
    pointer = response.$ref.slice(1);
    response = pointer.slice(1).split("/").reduce((node, key) => node[key], api.document);
  }
  if (!response.content?.["application/json"]) {
    if (body !== null && status < 400) problems.push(`${name} (${path}): GitHub sends no body`);
    return;
  }
  const validate = api.validator(`${pointer}/content/application~1json/schema`);
  if (!validate(body)) describe(`${name} (${path})`, validate);
}

function checkEvent({ event, payload }) {
  const action = payload.action ? `-${payload.action.replaceAll("_", "-")}` : "";
  const name = `${event.replaceAll("_", "-")}${action}`;
  counts[name] = (counts[name] ?? 0) + 1;
  if (!hooks.document.webhooks[name]) {
    problems.push(`GitHub has no event ${name}`);
    return;
  }
  const validate = hooks.validator(`/webhooks/${name}/post/requestBody/content/application~1json/schema`);
  if (!validate(payload)) describe(`event ${name}`, validate);
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  const record = JSON.parse(line);
  if (record.event) checkEvent(record);
  else checkAnswer(record);
}
console.log(JSON.stringify(counts));
if (problems.length > 0) {
  console.error(problems.join("\n\n"));
  process.exitCode = 1;
}
