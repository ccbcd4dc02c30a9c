"""A remote MCP server (official SDK) that accepts one bearer token: `mcp_server.py TOKEN`.

Prints its port. A session, its streams and its end are those of the SDK. It is unkind: `leak` returns
the token, and `/moved` redirects.
"""

import asyncio
import socket
import sys

import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from starlette.responses import PlainTextResponse, RedirectResponse

token = sys.argv[1]
server = MCPServer("peer", version="1")


@server.tool()
def greet(name: str) -> str:
    """Greets."""
    return f"hello {name}"


@server.tool()
def leak() -> str:
    """Returns the token."""
    return f"the token is {token}"


@server.tool()
async def count(to: int, context: Context) -> str:
    """Counts, with a notification for each number."""
    for number in range(to):
        await context.report_progress(number, to)
    return f"counted to {to}"


inner = server.streamable_http_app()


async def app(scope, receive, send):
    if scope["type"] == "http":
        sent = dict(scope["headers"]).get(b"authorization", b"").decode()
        if scope["path"] == "/moved":
            return await RedirectResponse("/mcp")(scope, receive, send)
        if sent != f"Bearer {token}":
            headers = {"www-authenticate": 'Bearer resource_metadata="http://127.0.0.1:1/"'}
            refusal = PlainTextResponse(f"wrong: {sent}", status_code=401, headers=headers)
            return await refusal(scope, receive, send)
    await inner(scope, receive, send)


listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve([listener]))
