//! The steps of the quickstart. Each calls the server like any client and prints its result and
//! duration.

use std::{fs, pin::pin, time::Instant};

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::StreamExt;
use harvest_proto::{
    AgentName, EventBody, ModelRef, NetworkPolicy, PromptText, RepositoryName, SessionId,
    api::{
        AddRepository, BuildRepository, CheckOutcome, CreatePrompt, CreateSession, ExecLine,
        ExecRequest, FindingLevel as Level, ForkSession, Session,
    },
    bridge::Exit,
};
use reqwest::Method;
use serde_json::json;

use super::sample;
use crate::{
    Invocation,
    backend::Backend,
    client::Client,
    commands::{self, watch::Screen},
    doctor,
    follow::{CompletionTracker, Lines, Update, Verdict},
    images,
    printer::{Advice, human_elapsed},
    publish::{NameConflict, Source, publish},
    server_process::RunningServer,
};

pub(super) const FIRST: &str =
    "A test of the calculator fails. Find out why, make it pass, commit and push.";
/// Queued while the first runs.
pub(super) const SECOND: &str =
    "Say in the README what the calculator can do, then commit and push.";
/// The prompts of the forks. One passes the tests, the other one does not.
pub(super) const VARIANTS: [&str; 2] = [
    "Double by shifting the bits, then commit.",
    "Add bit by bit, without the plus sign, then commit.",
];

/// What is printed at the end. Tests run its commands.
const NEXT_STEPS: &str = include_str!("next_steps.txt");

const STEPS: u32 = 8;

struct Tour<'a> {
    ctx: &'a Invocation,
    server: &'a RunningServer,
    agent: &'a AgentName,
    client: Client,
    step: u32,
    began: Instant,
}

pub(super) async fn run(ctx: &Invocation, server: &RunningServer, agent: &AgentName) -> Result<()> {
    let client = server.client()?;
    let mut tour = Tour { ctx, server, agent, client, step: 0, began: Instant::now() };
    tour.doctor()?;
    tour.image().await?;
    tour.sample().await?;
    let session = tour.session().await?;
    tour.diff(&session.id).await?;
    tour.pause(&session.id).await?;
    tour.pull_request(&session.id).await?;
    tour.variants(&session.id).await?;
    tour.next_steps();
    Ok(())
}

impl Tour<'_> {
    fn begin(&mut self, title: &str) {
        self.step += 1;
        self.began = Instant::now();
        self.ctx.print.note("");
        let step = self.ctx.print.stderr.bold(&format!("[{}/{STEPS}]", self.step));
        self.ctx.print.styled_note(&format!("{step} {title}"));
    }

    /// Prints the result of a step with its duration.
    fn done(&self, what: &str) {
        self.ctx.print.note(format!("{what} ({})", human_elapsed(self.began)));
    }

    fn doctor(&mut self) -> Result<()> {
        self.begin("Checking this machine");
        let checks = doctor::findings(&self.ctx.config.at(self.server.home()));
        for check in checks.iter().filter(|check| check.level != Level::Ok) {
            self.ctx.print.styled_note(&commands::check_line(self.ctx.print.stderr, check));
        }
        if checks.iter().any(|check| check.level == Level::Fail) {
            bail!(Advice::new(
                "this machine does not meet the requirements",
                "`harvest doctor` shows the failed checks and how to fix them"
            ));
        }
        self.done(&format!("{} checks passed", checks.len()));
        Ok(())
    }

    async fn image(&mut self) -> Result<()> {
        self.begin("An image to start sandboxes from");
        let backend = Backend::from_client(self.client.clone());
        let name = match &self.ctx.config.image {
            Some(name) => name.clone(),
            None => images::default_name(&backend, self.agent).await?,
        };
        images::ensure(&backend, &name, self.ctx.print).await?;
        self.done(&format!("Image {name} is ready"));
        Ok(())
    }

    async fn sample(&mut self) -> Result<()> {
        self.begin("A sample repository with a failing test, on a local forge, prebuilt");
        let folder = self.server.home().join("sample");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        sample::write(&folder)?;
        let name: RepositoryName = sample::NAME.parse().expect("a valid name");
        let request = AddRepository { name: Some(name.clone().into()), ..AddRepository::default() };
        let source = Source { folder: &folder, naming: NameConflict::Refuse, all: true };
        let forge = self.server.forge();
        let published = publish(self.ctx.print, &self.client, forge, source, request).await?;
        let (repository, order) = (&published.repository, BuildRepository::default());
        commands::build_repository(self.ctx, &self.client, repository, &order).await?;
        self.done(&format!("Registered and prebuilt {name}"));
        Ok(())
    }

    async fn session(&mut self) -> Result<Session> {
        let product = product(self.agent);
        self.begin(&format!(
            "A session: real {product} in a sandbox, two prompts, one pull request"
        ));
        self.ctx
            .print
            .note("The model is scripted: no account, no key, no cost. Everything else is real.");
        let request = CreateSession {
            repository: Some(sample::NAME.into()),
            prompt: Some(prompt(FIRST)),
            agent: Some(self.agent.clone()),
            model: Some(ModelRef::scripted()),
            network: Some(NetworkPolicy::None),
            ..CreateSession::default()
        };
        let session = self.client.create(&request).await.context("cannot create the session")?;
        self.ctx.print.note(format!("Created {} on {}", session.id, session.branch));
        self.ctx.print.note(format!(
            "Commits are by {} (Harvest) <{}>",
            session.author.name, session.author.email
        ));
        self.follow(&session.id, 0, Some(SECOND)).await?;
        self.done("Ran two prompts");
        Ok(session)
    }

    /// Prints a session's events until it is done; queues `next` after the first tool call.
    async fn follow(&self, id: &SessionId, after: u64, mut next: Option<&str>) -> Result<()> {
        let mut updates = pin!(self.client.follow(id, after));
        let mut screen = Screen::new(self.ctx, false);
        let mut tracker = CompletionTracker::default();
        while let Some(update) = updates.next().await {
            let Update::Event(event) = update? else { continue };
            screen.event(&event)?;
            if let (EventBody::ToolEnded { .. }, Some(text)) = (&event.body, next) {
                next = None;
                let request = CreatePrompt::new(prompt(text));
                self.client.prompt(id, &request).await.context("cannot queue the second prompt")?;
            }
            match tracker.event(&event.body) {
                // The session is done only after the second prompt was queued.
                Some(Verdict::Succeeded) if next.is_none() => return screen.finish(),
                Some(Verdict::Failed | Verdict::NeedsInput) => bail!(self.turn_failed(id)),
                _ => {}
            }
        }
        bail!("the event stream of {id} ended")
    }

    async fn diff(&mut self, id: &SessionId) -> Result<()> {
        self.begin("The changes");
        let diff = self.client.diff(id, "").await?;
        match self.ctx.print.json {
            true => self.ctx.print.item(&json!({ "session": id, "diff": diff }))?,
            false => self.ctx.print.verbatim(&diff)?,
        }
        self.done("Read the diff");
        Ok(())
    }

    async fn pause(&mut self, id: &SessionId) -> Result<()> {
        self.begin("Pause and resume: the sandbox is saved to disk and started again");
        let before = self.output(id, "git log --oneline -1 && grep -c . README.md calc.py").await?;
        self.client.pause(id).await.context("cannot pause")?;
        self.done("Paused");
        self.began = Instant::now();
        let paused = self.client.session(id).await?;
        self.client.post_verb(id, "resume").await.context("cannot resume")?;
        self.follow(id, paused.seq, None).await.context("the session did not resume")?;
        self.done("Resumed");
        let after = self.output(id, "git log --oneline -1 && grep -c . README.md calc.py").await?;
        if before != after {
            bail!("the files changed: {after} instead of {before}");
        }
        self.ctx.print.note(format!("Same files: {}", after.lines().next().unwrap_or("")));
        Ok(())
    }

    async fn variants(&mut self, id: &SessionId) -> Result<()> {
        self.begin("Fork turn 1 into two variants, judged by the repository's own tests");
        let prompts = VARIANTS.map(prompt).to_vec();
        let request = ForkSession { turn: Some(1), prompts, ..ForkSession::default() };
        let forks = self.client.fork(id, &request).await.context("cannot fork")?;
        let [first, second] = forks.as_slice() else { bail!("the server made other forks") };
        let judged = [(first, VARIANTS[0]), (second, VARIANTS[1])];
        let [passing, failing] = judged.map(|(fork, text)| self.judge(&fork.id, text));
        let (passing, failing) = tokio::try_join!(passing, failing)?;
        for Variant { id, prompt, exit, summary } in [&passing, &failing] {
            if self.ctx.print.json {
                let tests = json!({ "exit": exit, "summary": summary });
                self.ctx.print.item(&json!({ "session": id, "prompt": prompt, "tests": tests }))?;
            }
            let (mark, word) = match exit {
                Exit::Code(0) => (self.ctx.print.stderr.ok("✓"), "passed"),
                _ => (self.ctx.print.stderr.fail("✗"), "failed"),
            };
            self.ctx.print.styled_note(&format!("{mark} {prompt}"));
            self.ctx.print.note(format!("  {id}: its tests {word}: {summary}"));
        }
        if passing.exit != Exit::Code(0) || failing.exit == Exit::Code(0) {
            bail!("the tests judged the variants differently than expected");
        }
        self.done("Both began with the files and the conversation of turn 1");
        Ok(())
    }

    /// Waits for the fork's turn and runs the repository's check on its work.
    async fn judge(&self, id: &SessionId, prompt: &'static str) -> Result<Variant> {
        self.wait(id).await?;
        if self.output(id, "cat README.md").await?.contains("doubles") {
            bail!("the fork contains files from after turn 1");
        }
        let folder = conversations(self.agent);
        for (text, expected) in [(FIRST, true), (SECOND, false)] {
            let search = format!("grep -rqaF '{text}' ~/{folder}; echo $?");
            let found = self.output(id, &search).await?.trim() == "0";
            if found != expected {
                bail!("the fork's conversation is not the one of turn 1");
            }
        }
        let (exit, output) = self.command(id, "./.harvest/check.sh 2>&1").await?;
        let summary = output.lines().last().unwrap_or_default().to_owned();
        Ok(Variant { id: id.clone(), prompt, exit, summary })
    }

    /// Waits until a session is done, without printing its events.
    async fn wait(&self, id: &SessionId) -> Result<()> {
        let (mut updates, mut tracker) =
            (pin!(self.client.follow(id, 0)), CompletionTracker::default());
        while let Some(update) = updates.next().await {
            let Update::Event(event) = update? else { continue };
            match tracker.event(&event.body) {
                Some(Verdict::Succeeded) => return Ok(()),
                Some(Verdict::Failed | Verdict::NeedsInput) => bail!(self.turn_failed(id)),
                None => {}
            }
        }
        bail!("the event stream of {id} ended")
    }

    fn turn_failed(&self, id: &SessionId) -> Advice {
        let home = self.server.home().display();
        let hint = format!("`harvest --home {home} up`, then `harvest --home {home} logs {id}`");
        Advice::new("the turn failed", hint)
    }

    async fn pull_request(&mut self, id: &SessionId) -> Result<()> {
        self.begin("The pull request and the result of Harvest's own check");
        let pull_request = self.client.pull_request(id).await?;
        match self.ctx.print.json {
            true => self.ctx.print.item(&pull_request)?,
            false => {
                let text = commands::pull_request_text(&pull_request, self.ctx.print.stdout);
                self.ctx.print.styled_out(&text)?;
            }
        }
        if !pull_request
            .evidence
            .as_ref()
            .is_some_and(|evidence| evidence.outcome == CheckOutcome::Passed)
        {
            bail!("the pull request has no passed check");
        }
        self.done("Read the pull request");
        Ok(())
    }

    fn next_steps(&self) {
        let home = self.server.home().display().to_string();
        let key = match self.agent {
            AgentName::Codex => "OPENAI_API_KEY",
            _ => "ANTHROPIC_API_KEY",
        };
        let steps = NEXT_STEPS.replace("{key}", &format!("{key:<19}"));
        self.ctx.print.note(format!(
            "\n{steps}The demo's data is kept: `harvest --home {home} up -d`, then `harvest --home \
             {home} ls`; `harvest quickstart --clean` removes it."
        ));
    }

    /// The output of a command in the session's checkout.
    async fn output(&self, id: &SessionId, script: &str) -> Result<String> {
        Ok(self.command(id, script).await?.1)
    }

    /// Runs a command in the session's checkout; returns how it ended, and its output.
    async fn command(&self, id: &SessionId, script: &str) -> Result<(Exit, String)> {
        let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
        let request = self.client.request(Method::POST, &format!("/v1/sessions/{id}/exec"));
        let request = request.json(&ExecRequest { argv, ..ExecRequest::default() });
        let mut lines = Lines::new(self.client.send(request).await?);
        let mut printed = Vec::new();
        while let Some(line) = lines.json::<ExecLine>().await? {
            match line {
                ExecLine::Stdout { data } => printed.extend(BASE64_STANDARD.decode(data)?),
                ExecLine::Stderr { .. } | ExecLine::Started { .. } => {}
                ExecLine::Exited { exit, .. } => {
                    return Ok((exit, String::from_utf8_lossy(&printed).into_owned()));
                }
                ExecLine::Failed { message, .. } => bail!("cannot run `{script}`: {message}"),
            }
        }
        bail!("the response ended before `{script}` finished")
    }
}

/// A fork and what the tests say of it.
struct Variant {
    id: SessionId,
    prompt: &'static str,
    exit: Exit,
    /// The last line of the tests.
    summary: String,
}

/// The name of an agent's product.
fn product(agent: &AgentName) -> &str {
    match agent {
        AgentName::Claude => "Claude Code",
        AgentName::Opencode => "OpenCode",
        AgentName::Codex => "Codex",
        other => other.as_str(),
    }
}

/// The folder below its user's home where an agent keeps its conversations.
fn conversations(agent: &AgentName) -> &'static str {
    match agent {
        AgentName::Opencode => ".local/share/opencode",
        AgentName::Codex => ".codex/sessions",
        _ => ".claude/projects",
    }
}

fn prompt(text: &str) -> PromptText {
    text.parse().expect("the tour's prompts are valid")
}
