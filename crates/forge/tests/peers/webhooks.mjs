// Webhooks with GitHub's own library. `send URL SECRET` signs and sends every example of
// @octokit/webhooks-examples, and prints how often it got which status. `receive SECRET` prints the
// port it listens on, and then each event whose signature is correct; it ends with its input.
import http from "node:http";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.cwd()}/`);
const { Webhooks } = await import(pathToFileURL(`${process.cwd()}/node_modules/@octokit/webhooks/dist-bundle/index.js`));
const [mode, ...rest] = process.argv.slice(2);

async function send([url, secret]) {
  const webhooks = new Webhooks({ secret });
  const statuses = {};
  let sent = 0;
  for (const { name, examples } of require("@octokit/webhooks-examples")) {
    for (const example of examples) {
      const body = JSON.stringify(example);
      const headers = {
        "content-type": "application/json",
        "x-github-event": name,
        "x-github-delivery": `example-${(sent += 1)}`,
        "x-hub-signature-256": await webhooks.sign(body),
      };
      const { status } = await fetch(url, { method: "POST", headers, body });
      statuses[status] = (statuses[status] ?? 0) + 1;
    }
  }
  console.log(JSON.stringify({ sent, statuses }));
}

function receive([secret]) {
  const webhooks = new Webhooks({ secret });
  const server = http.createServer(async (request, response) => {
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    const payload = Buffer.concat(chunks).toString();
    const delivery = { id: request.headers["x-github-delivery"], name: request.headers["x-github-event"], payload };
    try {
      await webhooks.verifyAndReceive({ ...delivery, signature: request.headers["x-hub-signature-256"] ?? "" });
      console.log(JSON.stringify({ event: delivery.name, payload: JSON.parse(payload) }));
      response.writeHead(202).end();
    } catch (error) {
      console.log(JSON.stringify({ refused: delivery.name }));
      response.writeHead(400).end();
    }
  });
  server.listen(0, "127.0.0.1", () => console.log(JSON.stringify({ port: server.address().port })));
  process.stdin.resume();
  process.stdin.on("end", () => process.exit(0));
}

await (mode === "send" ? send(rest) : receive(rest));
