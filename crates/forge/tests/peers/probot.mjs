// A probot App that answers each new pull request with a comment and a commit status. Arguments:
// the URL of the API, the file of the App's key, its id, the secret of webhooks. Prints the port
// that it listens on, and then what it has done.
import fs from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [baseUrl, key, appId, secret] = process.argv.slice(2);
const require = createRequire(`${process.cwd()}/`);
const { Probot, createNodeMiddleware } = await import(pathToFileURL(require.resolve("probot")));

const privateKey = fs.readFileSync(key, "utf8");
const probot = new Probot({ appId, privateKey, secret, baseUrl, logLevel: "fatal" });
const answer = (app) => {
  app.on("pull_request.opened", async (context) => {
    // A webhook of a repository does not name the App's installation.
    const self = await app.auth();
    const { data: installation } = await self.rest.apps.getRepoInstallation(context.repo());
    const octokit = await app.auth(installation.id);
    const { data: comment } = await octokit.rest.issues.createComment(context.issue({ body: "Thank you" }));
    const sha = context.payload.pull_request.head.sha;
    const { data: status } = await octokit.rest.repos.createCommitStatus(
      context.repo({ sha, state: "success", context: "probot" }),
    );
    console.log(JSON.stringify({ comment: comment.body, by: comment.user.login, status: status.state }));
  });
  app.webhooks.onError((error) => console.log(JSON.stringify({ error: String(error) })));
};
const middleware = await createNodeMiddleware(answer, { probot, webhooksPath: "/" });
const server = http.createServer(middleware);
server.listen(0, "127.0.0.1", () => console.log(JSON.stringify({ port: server.address().port })));
process.stdin.resume();
process.stdin.on("end", () => process.exit(0));
