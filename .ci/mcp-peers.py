"""Calls the memory tools of an MCP server with the official client and prints each result.

`mcp-peers.py http URL` calls a server over HTTP; `mcp-peers.py stdio COMMAND…` starts one. The same
calls to Harvest and to the stock memory server must print the same. With `read` in place of `stdio`
it only prints the graph.
"""

import asyncio
import json
import sys

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


async def main(kind, *target):
    if kind == "http":
        async with streamable_http_client(target[0]) as streams:
            await call_all(streams[:2])
    else:
        server = StdioServerParameters(command=target[0], args=list(target[1:]))
        async with stdio_client(server) as streams:
            await (read if kind == "read" else call_all)(streams)


asyncio.run(main(*sys.argv[1:]))
