// A GitHub of strangers with one repository, a branch with a change, and an App. Arguments: the file
// of the App's key, the URL and the secret of its webhooks. Prints its URL, and ends with its input.
import fs from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.cwd()}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { createEmulator } = await import(pathToFileURL(`${process.cwd()}/node_modules/emulate/dist/api.js`));
const { App } = await load("@octokit/app");
const { Octokit } = await load("@octokit/rest");

const [keyFile, webhook_url, webhook_secret] = process.argv.slice(2);
const privateKey = fs.readFileSync(keyFile, "utf8");
const permissions = { contents: "write", issues: "write", metadata: "read", pull_requests: "write", statuses: "write" };
const app = {
  app_id: 7, slug: "harvest", name: "Harvest", private_key: privateKey, permissions,
  events: ["push", "pull_request", "status"], webhook_url, webhook_secret,
  installations: [{ installation_id: 100, account: "acme", repository_selection: "all" }],
};
const repo = { owner: "acme", name: "shop", auto_init: true };
const seed = { github: { users: [{ login: "acme" }], repos: [repo], apps: [app] } };
const github = await createEmulator({ service: "github", port: 0, seed });

const log = { debug() {}, info() {}, warn() {}, error() {} };
const client = Octokit.defaults({ baseUrl: github.url, log });
const octokit = await new App({ appId: 7, privateKey, log, Octokit: client }).getInstallationOctokit(100);
const repository = { owner: "acme", repo: "shop" };
const { data: main } = await octokit.rest.git.getRef({ ...repository, ref: "heads/main" });
await octokit.rest.git.createRef({ ...repository, ref: "refs/heads/harvest/a", sha: main.object.sha });
await octokit.rest.repos.createOrUpdateFileContents({
  ...repository, path: "one", branch: "harvest/a", message: "Add one", content: Buffer.from("one\n").toString("base64"),
});
console.log(JSON.stringify({ url: github.url }));
process.stdin.resume();
process.stdin.on("end", () => process.exit(0));
