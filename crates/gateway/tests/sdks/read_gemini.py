"""Reads the scripted model with the official SDK of Gemini, which checks each response."""

import json
import sys

from google import genai
from google.genai import errors, types

PROPERTIES = {"command": {"type": "string"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["command"]}
BASH = types.FunctionDeclaration(name="bash", parameters_json_schema=SCHEMA)
CONFIG = types.GenerateContentConfig(
    tools=[types.Tool(function_declarations=[BASH])],
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
)
ANSWER = [[
    {"thinking": "hm"}, {"text": "Hello wörld"}, {"bash": "ls -l"},
    {"usage": {"input": 7, "output": 8, "cache_read": 9, "cache_write": 2}},
]]
BUSY = [[{"error": {"status": 503, "type": "overloaded_error", "times": 2}}, {"text": "ok now"}]]
DENIED = [{"error": {"status": 401, "type": "authentication_error", "times": 9}}]

retries = types.HttpRetryOptions(attempts=3, initial_delay=0.01, max_delay=0.01)
options = types.HttpOptions(base_url=sys.argv[1], api_version="v1beta", retry_options=retries)
client = genai.Client(api_key="x", http_options=options)


def request(steps):
    prompt = "gemini\nscript: " + json.dumps(steps)
    return {"model": "m", "contents": prompt, "config": CONFIG}


def summary(responses):
    parts = [part for one in responses for part in one.candidates[0].content.parts]
    calls = [part.function_call for part in parts if part.function_call]
    last = responses[-1]
    return {
        "text": "".join(part.text or "" for part in parts if not part.thought),
        "call": [calls[0].name, calls[0].args] if calls else None,
        "stop": last.candidates[0].finish_reason.value,
        "tokens": [
            last.usage_metadata.prompt_token_count,
            last.usage_metadata.candidates_token_count,
            last.usage_metadata.cached_content_token_count,
        ],
    }


def failure(action):
    try:
        action()
    except errors.APIError as error:
        return error.code
    return None


whole = summary([client.models.generate_content(**request(ANSWER))])
streamed = summary(list(client.models.generate_content_stream(**request(ANSWER))))
assert whole == streamed, (whole, streamed)
print(json.dumps({
    "answer": whole,
    "retried": failure(lambda: client.models.generate_content(**request(BUSY))),
    "denied": failure(lambda: client.models.generate_content(**request(DENIED))),
    "counted": client.models.count_tokens(model="m", contents="hello").total_tokens > 0,
    "models": [model.name for model in client.models.list()],
    "model": client.models.get(model="scripted").name,
}))
