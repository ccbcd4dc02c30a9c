// Uses the forge as a GitHub App does, with GitHub's own client. Arguments: the URL of the API, the
// file of the App's key, its id. Prints what it saw as JSON.
import fs from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { App } = await import(require.resolve("@octokit/app"));
const { Octokit } = await import(require.resolve("@octokit/rest"));

const [baseUrl, key, appId] = process.argv.slice(2);
const privateKey = fs.readFileSync(key, "utf8");
const log = { debug() {}, info() {}, warn() {}, error() {} };
const app = new App({ appId, privateKey, log, Octokit: Octokit.defaults({ baseUrl, log }) });
const repository = { owner: "local", repo: "app" };

const { data: self } = await app.octokit.request("GET /app");
const installations = [];
for await (const { installation } of app.eachInstallation.iterator()) installations.push(installation.id);
const repositories = [];
for await (const { octokit, repository } of app.eachRepository.iterator()) repositories.push(repository.full_name);

const octokit = await app.getInstallationOctokit(installations[0]);
const { data: main } = await octokit.rest.git.getRef({ ...repository, ref: "heads/main" });
await octokit.rest.git.createRef({ ...repository, ref: "refs/heads/octokit", sha: main.object.sha });
const change = await octokit.rest.repos.getCommit({ ...repository, ref: "harvest/a" });
await octokit.rest.git.updateRef({ ...repository, ref: "heads/octokit", sha: change.data.sha });
const { data: pull } = await octokit.rest.pulls.create({
  ...repository, title: "From Octokit", body: "A body", head: "octokit", base: "main",
});
const again = await octokit.rest.pulls
  .create({ ...repository, title: "Twice", head: "octokit", base: "main" })
  .then(() => "created", (error) => `${error.status} ${error.response.data.errors[0].message}`);
const files = await octokit.paginate(octokit.rest.pulls.listFiles, { ...repository, pull_number: pull.number, per_page: 1 });
await octokit.rest.issues.createComment({ ...repository, issue_number: pull.number, body: "Looks good" });
await octokit.rest.repos.createCommitStatus({ ...repository, sha: pull.head.sha, state: "success", context: "check" });
const { data: status } = await octokit.rest.repos.getCombinedStatusForRef({ ...repository, ref: "octokit" });
const { data: content } = await octokit.rest.repos.getContent({ ...repository, path: "one", ref: "main" });
const { data: raw } = await octokit.rest.repos.getContent({ ...repository, path: "one", mediaType: { format: "raw" } });
const { data: diff } = await octokit.rest.pulls.get({ ...repository, pull_number: pull.number, mediaType: { format: "diff" } });
const { data: merged } = await octokit.rest.pulls.merge({ ...repository, pull_number: pull.number });
const { data: after } = await octokit.rest.pulls.get({ ...repository, pull_number: pull.number });
const comments = await octokit.paginate(octokit.rest.issues.listComments, { ...repository, issue_number: pull.number });
const { data: workflows } = await octokit.rest.actions.listWorkflowRunsForRepo(repository);

console.log(JSON.stringify({
  app: self.slug,
  installations: installations.length,
  repositories,
  author: pull.user.login,
  mergeable: pull.mergeable,
  again,
  files: files.map((file) => [file.filename, file.status]),
  status: status.state,
  content: Buffer.from(content.content, "base64").toString(),
  raw,
  diff: diff.startsWith("diff --git "),
  merged: merged.merged,
  state: [after.state, after.merged, after.merge_commit_sha === merged.sha],
  comments: comments.map((comment) => comment.body),
  runs: workflows.total_count,
}));
