"""Reads the scripted model with the official SDKs; every event must match their types."""

import json
import sys

import anthropic
import openai
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

host = sys.argv[1]
PROPERTIES = {"command": {"type": "string"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["command"]}
ANSWER = [[
    {"thinking": "hm"}, {"text": "Hello wörld"}, {"bash": "ls -l"},
    {"usage": {"input": 7, "output": 8, "cache_read": 9, "cache_write": 2}},
]]
BUSY = [[{"error": {"status": 529, "type": "overloaded_error", "times": 2}}, {"text": "ok now"}]]
DENIED = [{"error": {"status": 401, "type": "authentication_error", "times": 9}}]
CUT = [[{"text": "before"}, {"drop": 9}, {"text": "after"}]]


def valid(kind, value):
    """The value, checked against the SDK's own type: the SDK itself accepts anything."""
    TypeAdapter(kind).validate_python(value.to_dict())
    return value


def prompt(api, steps):
    # The scripted model counts the failures of each prompt.
    return type(api).__name__ + "\nscript: " + json.dumps(steps)


class Chat:
    client = openai.OpenAI(base_url=host + "/v1", api_key="x")

    def options(self, steps):
        function = {"name": "bash", "parameters": SCHEMA}
        tools = [{"type": "function", "function": function}]
        return {"model": "m", "messages": [{"role": "user", "content": prompt(self, steps)}], "tools": tools}

    def plain(self, steps):
        return valid(ChatCompletion, self.client.chat.completions.create(**self.options(steps)))

    def streamed(self, client, steps):
        wish = {"include_usage": True}
        stream = client.chat.completions.create(**self.options(steps), stream=True, stream_options=wish)
        for chunk in stream:
            valid(ChatCompletionChunk, chunk)

    def helper(self, steps):
        wish = {"include_usage": True}
        with self.client.chat.completions.stream(**self.options(steps), stream_options=wish) as stream:
            return stream.get_final_completion()

    def summary(self, answer):
        message, usage = answer.choices[0].message, answer.usage
        details = usage.prompt_tokens_details
        call = message.tool_calls[0].function if message.tool_calls else None
        return {
            "text": message.content,
            "call": call and [call.name, json.loads(call.arguments)],
            "stop": answer.choices[0].finish_reason,
            "tokens": [usage.prompt_tokens, usage.completion_tokens, details.cached_tokens],
        }


class Responses:
    client = openai.OpenAI(base_url=host + "/v1", api_key="x")

    def options(self, steps):
        tools = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
        return {"model": "m", "input": prompt(self, steps), "tools": tools}

    def plain(self, steps):
        return valid(Response, self.client.responses.create(**self.options(steps)))

    def streamed(self, client, steps):
        numbers = []
        for event in client.responses.create(**self.options(steps), stream=True):
            numbers.append(valid(ResponseStreamEvent, event).sequence_number)
        assert numbers == list(range(len(numbers))), numbers

    def helper(self, steps):
        with self.client.responses.stream(**self.options(steps)) as stream:
            return stream.get_final_response()

    def summary(self, answer):
        usage = answer.usage
        calls = [item for item in answer.output if item.type == "function_call"]
        return {
            "text": answer.output_text,
            "call": [calls[0].name, json.loads(calls[0].arguments)] if calls else None,
            "stop": answer.status,
            "tokens": [usage.input_tokens, usage.output_tokens, usage.input_tokens_details.cached_tokens],
        }


class Messages:
    client = anthropic.Anthropic(base_url=host, api_key="x")

    def options(self, steps):
        tools = [{"name": "bash", "input_schema": SCHEMA}]
        messages = [{"role": "user", "content": prompt(self, steps)}]
        return {"model": "m", "max_tokens": 99, "messages": messages, "tools": tools}

    def plain(self, steps):
        return valid(Message, self.client.messages.create(**self.options(steps)))

    def streamed(self, client, steps):
        for event in client.messages.create(**self.options(steps), stream=True):
            valid(RawMessageStreamEvent, event)

    def helper(self, steps):
        with self.client.messages.stream(**self.options(steps)) as stream:
            return stream.get_final_message()

    def summary(self, answer):
        texts = [block.text for block in answer.content if block.type == "text"]
        calls = [block for block in answer.content if block.type == "tool_use"]
        usage = answer.usage
        return {
            "text": "".join(texts),
            "call": [calls[0].name, calls[0].input] if calls else None,
            "stop": answer.stop_reason,
            "tokens": [usage.input_tokens, usage.output_tokens, usage.cache_read_input_tokens],
        }


def failure(action):
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return None


def check(api):
    once = api.client.with_options(max_retries=0)
    quick = api.client.with_options(max_retries=2)
    quick._calculate_retry_timeout = lambda *_, **__: 0
    api.streamed(api.client, ANSWER)
    whole = api.summary(api.helper(ANSWER))
    assert whole == api.summary(api.plain(ANSWER)), whole
    models = api.client.models.list()
    return {
        "answer": whole,
        "retried": failure(lambda: api.streamed(quick, BUSY)),
        "denied": failure(lambda: api.streamed(once, DENIED)),
        "cut": failure(lambda: api.streamed(once, CUT)) is not None,
        "models": [valid(type(model), model).id for model in models],
        "model": api.client.models.retrieve("scripted").id,
    }


apis = {"chat": Chat(), "responses": Responses(), "messages": Messages()}
print(json.dumps({name: check(api) for name, api in apis.items()}))
