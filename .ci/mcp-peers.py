"""Calls the memory tools of an MCP server with the official client and prints each result.

`mcp-peers.py http URL` calls a server over HTTP; `mcp-peers.py stdio COMMAND…` starts one. The same
calls to Harvest and to the stock memory server must print the same. With `read` in place of `stdio`
it only prints the graph. With `sessions KEY COMMAND…` it uses the tools of `harvest mcp`, and with
`sessions-http KEY URL TOKEN` those of the server.
"""

import asyncio
import json
import os
import sys

import httpx2

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client


def entity(name, *observations):
    return {"name": name, "entityType": "Thing", "observations": list(observations)}


def relation(source, target):
    return {"from": source, "to": target, "relationType": "uses"}


CALLS = [
    ("create_entities", {"entities": [entity("api", "port 80", 'Ünïcode "x"\nline'), entity("db")]}),
    ("create_entities", {"entities": [entity("api", "ignored"), entity("cache", "100%")]}),
    ("create_relations", {"relations": [relation("api", "db"), relation("api", "nowhere")]}),
    ("create_relations", {"relations": [relation("api", "db"), relation("db", "cache")]}),
    ("add_observations", {"observations": [{"entityName": "db", "contents": ["big", "slow"]}]}),
    ("add_observations", {"observations": [{"entityName": "db", "contents": ["slow", "old"]}]}),
    ("read_graph", {}),
    ("search_nodes", {"query": "ÜNÏ"}),
    ("search_nodes", {"query": "thing"}),
    ("search_nodes", {"query": "0%"}),
    ("open_nodes", {"names": ["cache", "unknown"]}),
    ("delete_observations", {"deletions": [{"entityName": "db", "observations": ["slow", "no"]}]}),
    ("delete_relations", {"relations": [relation("api", "nowhere"), relation("x", "y")]}),
    ("delete_entities", {"entityNames": ["cache", "unknown"]}),
    ("read_graph", {}),
]


async def read(streams):
    async with ClientSession(*streams) as session:
        await session.initialize()
        graph = await session.call_tool("read_graph", {})
        print(json.dumps(graph.structured_content, sort_keys=True))


async def call_all(streams):
    async with ClientSession(*streams) as session:
        started = await session.initialize()
        tools = {tool.name for tool in (await session.list_tools()).tools}
        missing = {name for name, _ in CALLS} - tools
        assert not missing, f"the server lacks {missing}"
        print(f"{started.server_info.name}: {len(tools)} tools", file=sys.stderr)
        for name, arguments in CALLS:
            result = await session.call_tool(name, arguments)
            text = "".join(part.text for part in result.content)
            shown = {"tool": name, "text": text, "structured": result.structured_content}
            print(json.dumps({**shown, "error": bool(result.is_error)}, sort_keys=True))
        unknown = [{"entityName": "unknown", "contents": ["x"]}]
        failed = await session.call_tool("add_observations", {"observations": unknown})
        assert failed.is_error, failed


async def steer(streams, key):
    async with ClientSession(*streams) as session:
        await session.initialize()
        tools = {tool.name for tool in (await session.list_tools()).tools}

        async def use(tool, **arguments):
            tools.discard(tool)
            result = await session.call_tool(tool, arguments)
            assert not result.is_error, result
            return result.structured_content, result.content[0].text

        mine = {"session": key}
        script = json.dumps([{"bash": "echo new > note"}, {"text": "The note is there."}])
        await use("start_session", prompt=f"Write.\nscript: {script}", repository="calc",
                  agent="scripted", network="none", key=key)
        assert (await use("wait_for_session", **mine))[0]["state"] == "idle"
        _, text = await use("read_session", **mine)
        after = int(text.rsplit("after=", 1)[1].rstrip("]"))
        assert "The note is there." in text, text
        assert "+new" in (await use("session_diff", **mine))[1]
        await use("send_prompt", prompt='Wait.\nscript: [{"hang": 600}]', **mine)
        await use("stop_session", **mine)
        assert (await use("wait_for_session", **mine))[0]["state"] == "idle"
        later = (await use("read_session", after=after, **mine))[1]
        assert "[turn stopped" in later, later
        assert (await use("show_session", **mine))[0]["key"] == key
        listed = (await use("list_sessions", limit=5))[0]["sessions"]
        assert key in [one.get("key") for one in listed], listed
        await use("pause_session", **mine)
        assert not tools, f"never called: {tools}"
        failed = await session.call_tool("send_prompt", {"session": "no-such", "prompt": "x"})
        assert failed.is_error, failed
    print("the official client steers a session")


async def main(kind, *target):
    if kind == "sessions":
        server = StdioServerParameters(command=target[1], args=list(target[2:]), env=dict(os.environ))
        async with stdio_client(server) as streams:
            await steer(streams, target[0])
    elif kind == "sessions-http":
        headers = {"authorization": f"Bearer {target[2]}"}
        async with httpx2.AsyncClient(headers=headers, timeout=60) as client:
            async with streamable_http_client(target[1], http_client=client) as streams:
                await steer(streams[:2], target[0])
    elif kind == "http":
        async with streamable_http_client(target[0]) as streams:
            await call_all(streams[:2])
    else:
        server = StdioServerParameters(command=target[0], args=list(target[1:]))
        async with stdio_client(server) as streams:
            await (read if kind == "read" else call_all)(streams)


asyncio.run(main(*sys.argv[1:]))
