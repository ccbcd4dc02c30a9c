"""Uses an MCP server over HTTP with the official client and prints what it saw: `mcp_client.py URL`."""

import asyncio
import json
import sys

from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client


async def main(url):
    async with streamable_http_client(url) as streams:
        async with ClientSession(*streams[:2]) as session:
            started = await session.initialize()
            tools = [tool.name for tool in (await session.list_tools()).tools]
            progress = []

            async def on_progress(number, total, message):
                progress.append(number)

            texts = []
            for name, arguments in [("greet", {"name": "Ada"}), ("leak", {}), ("count", {"to": 3})]:
                result = await session.call_tool(name, arguments, progress_callback=on_progress)
                texts.append(result.content[0].text)
            shown = {"server": started.server_info.name, "tools": sorted(tools), "texts": texts}
            print(json.dumps({**shown, "progress": progress}))


asyncio.run(main(sys.argv[1]))
