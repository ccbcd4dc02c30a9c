//! The steps of the quickstart, in their order. Each asks the server as any client would, prints what
//! it shows and how long it took.

use std::{fs, pin::pin, time::Instant};

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::StreamExt;
use harvest_proto::{
    EventBody, SessionId,
    api::{
        AddRepository, CreatePrompt, CreateSession, ExecLine, ExecRequest, ForkSession, Session,
        machines::FindingLevel as Level,
    },
};
use serde_json::json;

use super::sample;
use crate::{
    Invocation,
    client::Client,
    commands::{self, watch::Screen},
    desk::Desk,
    doctor,
    follow::{Update, Verdict, Watch},
    images,
    printer::{Advice, took},
    publish::{Naming, publish},
    wire::Serving,
};

/// The first prompt.
pub(super) const FIRST: &str =
    "A test of the calculator fails. Find out why, make it pass, commit and push.";
/// Queued while the first runs.
pub(super) const SECOND: &str =
    "Say in the README what the calculator can do, then commit and push.";
/// Asked of the fork.
pub(super) const THIRD: &str = "Where are we?";

/// How many steps there are.
const STEPS: u32 = 8;

struct Tour<'a> {
    here: &'a Invocation,
    serving: &'a Serving,
    client: Client,
    step: u32,
    began: Instant,
}

/// Takes every step.
pub(super) async fn run(here: &Invocation, serving: &Serving) -> Result<()> {
    let client = serving.client()?;
    let mut tour = Tour { here, serving, client, step: 0, began: Instant::now() };
    tour.doctor()?;
    tour.image().await?;
    tour.sample().await?;
    let session = tour.session().await?;
    tour.diff(&session.id).await?;
    tour.pause(&session.id).await?;
    tour.fork(&session.id).await?;
    tour.pull(&session.id).await?;
    tour.farewell();
    Ok(())
}

impl Tour<'_> {
    /// Announces a step.
    fn begin(&mut self, title: &str) {
        self.step += 1;
        self.began = Instant::now();
        self.here.print.note("");
        self.here.print.marked(&format!("[{}/{STEPS}]", self.step), "1", &format!(" {title}"));
    }

    /// Says what a step did, and how long it took.
    fn done(&self, what: &str) {
        let millis = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.here.print.note(format!("{what} in {}", took(millis)));
    }

    fn doctor(&mut self) -> Result<()> {
        self.begin("Does this machine have what it takes?");
        let checks = doctor::findings(&self.here.config.at(self.serving.home()));
        for check in checks.iter().filter(|check| check.level != Level::Ok) {
            let (word, color, rest) = commands::check_line(check);
            self.here.print.marked(&word, color, &rest);
        }
        if checks.iter().any(|check| check.level == Level::Fail) {
            bail!(Advice::new(
                "this machine lacks something",
                "`harvest doctor` says what, and how to mend it"
            ));
        }
        self.done(&format!("Checked {} abilities", checks.len()));
        Ok(())
    }

    async fn image(&mut self) -> Result<()> {
        self.begin("An image to start sandboxes from");
        let name = &self.here.config.image;
        images::build(&Desk::of(self.client.clone()), name, false, self.here.print).await?;
        self.done(&format!("Made sure of image {name}"));
        Ok(())
    }

    async fn sample(&mut self) -> Result<()> {
        self.begin("A sample repository with a failing test, on a forge of its own, prebuilt");
        let folder = self.serving.home().join("sample");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        sample::write(&folder)?;
        let request = AddRepository { name: Some(sample::NAME.into()), ..AddRepository::default() };
        let named = (folder.as_path(), Naming::Strict);
        publish(self.here.print, &self.client, self.serving.forge(), named, request).await?;
        commands::build_repository(self.here, &self.client, sample::NAME).await?;
        self.done("Registered and prebuilt calc");
        Ok(())
    }

    async fn session(&mut self) -> Result<Session> {
        self.begin("A session: real Claude Code in a sandbox, two prompts, one pull request");
        self.here
            .print
            .note("The model is scripted: no account, no key, no cost. All else is real.");
        let request = CreateSession {
            repository: Some(sample::NAME.into()),
            prompt: Some(FIRST.into()),
            model: Some("scripted".into()),
            network: Some("none".into()),
            ..CreateSession::default()
        };
        let session = self.client.create(&request).await.context("cannot create the session")?;
        self.here.print.note(format!("Created {} on {}", session.id, session.branch));
        self.here.print.note(format!("Commits are by {} (Harvest)", session.author.name));
        self.follow(&session.id, 0, Some(SECOND)).await?;
        self.done("Carried out two prompts");
        Ok(session)
    }

    /// Prints a session's events until it rests; queues `next` as soon as the first tool has answered.
    async fn follow(&self, id: &SessionId, after: u64, mut next: Option<&str>) -> Result<()> {
        let mut updates = pin!(self.client.follow(id, after));
        let mut screen = Screen::new(self.here, false);
        let mut watch = Watch::default();
        while let Some(update) = updates.next().await {
            let Update::Event(event) = update? else { continue };
            screen.event(&event)?;
            if let (EventBody::ToolEnded { .. }, Some(text)) = (&event.body, next) {
                next = None;
                let request = CreatePrompt { text: text.into(), ..CreatePrompt::default() };
                self.client.prompt(id, &request).await.context("cannot queue the second prompt")?;
            }
            match watch.event(&event.body) {
                // The second prompt has to be queued before rest means the end.
                Some(Verdict::Good) if next.is_none() => return screen.finish(),
                Some(Verdict::Bad | Verdict::Asked) => {
                    let home = self.serving.home().display();
                    let hint = format!(
                        "`harvest --home {home} up`, then `harvest --home {home} logs {id}`"
                    );
                    bail!(Advice::new("the turn did not end well", hint));
                }
                _ => {}
            }
        }
        bail!("the stream of {id} ended")
    }

    async fn diff(&mut self, id: &SessionId) -> Result<()> {
        self.begin("What it changed");
        let diff = self.client.diff(id, "").await?;
        match self.here.print.json {
            true => self.here.print.item(&json!({ "session": id, "diff": diff }))?,
            false => self.here.print.exact(&diff)?,
        }
        self.done("Read the difference");
        Ok(())
    }

    async fn pause(&mut self, id: &SessionId) -> Result<()> {
        self.begin("Pause and resume: the machine is kept on disk and comes back");
        let before = self.output(id, "git log --oneline -1 && grep -c . README.md calc.py").await?;
        self.client.pause(id).await.context("cannot pause")?;
        self.done("Paused");
        self.began = Instant::now();
        let paused = self.client.session(id).await?;
        self.client.act(id, "resume").await.context("cannot resume")?;
        self.until_idle(id, paused.seq).await?;
        self.done("Resumed");
        let after = self.output(id, "git log --oneline -1 && grep -c . README.md calc.py").await?;
        if before != after {
            bail!("the files are not what they were: {after} instead of {before}");
        }
        self.here.print.note(format!("Same files: {}", after.lines().next().unwrap_or("")));
        Ok(())
    }

    async fn fork(&mut self, id: &SessionId) -> Result<()> {
        self.begin("Fork turn 1: files and conversation as they were before the README changed");
        let request =
            ForkSession { turn: Some(1), prompt: Some(THIRD.into()), ..ForkSession::default() };
        let forks = self.client.fork(id, &request).await.context("cannot fork")?;
        let fork = forks.into_iter().next().context("the server made no fork")?;
        self.here.print.note(format!("Forked {id} at turn 1 as {}", fork.id));
        self.follow(&fork.id, 0, None).await?;
        let readme = self.output(&fork.id, "cat README.md").await?;
        if readme.contains("doubles") {
            bail!("the fork holds files of what came after turn 1");
        }
        // Where Claude Code keeps its conversations.
        let said = self.output(&fork.id, "cat /home/harvest/.claude/projects/*/*.jsonl").await?;
        if !said.contains(FIRST) || said.contains(SECOND) {
            bail!("the fork's conversation is not the one of turn 1");
        }
        self.here.print.note("Same conversation: it knows the first prompt and not the second");
        self.done("Went back to the end of turn 1");
        Ok(())
    }

    async fn pull(&mut self, id: &SessionId) -> Result<()> {
        self.begin("The pull request, and what the platform itself saw");
        let pull = self.client.pull(id).await?;
        match self.here.print.json {
            true => self.here.print.item(&pull)?,
            false => self.here.print.out(&commands::pull_text(&pull))?,
        }
        if !pull.evidence.as_ref().is_some_and(|evidence| evidence.passed) {
            bail!("the pull request has no evidence that its check passed");
        }
        self.done("Read the pull request");
        Ok(())
    }

    fn farewell(&self) {
        let home = self.serving.home().display().to_string();
        let listen = self.here.config.listen;
        self.here.print.note(format!(
            "\nThat was all of it. With your own code, in two terminals:\n  \
             harvest up                             start the server, on {listen}\n  \
             harvest secret set ANTHROPIC_API_KEY   use a real model\n  \
             harvest run -r https://…/app.git \"…\"   give it something to do\n\
             What this showed is kept; to look around in it, again in two terminals:\n  \
             harvest --home {home} up\n  \
             harvest --home {home} ls\n\
             `harvest quickstart --clean` removes it."
        ));
    }

    /// Waits until a resumed session takes prompts again.
    async fn until_idle(&self, id: &SessionId, after: u64) -> Result<()> {
        let mut updates = pin!(self.client.follow(id, after));
        let mut screen = Screen::new(self.here, false);
        let mut watch = Watch::default();
        while let Some(update) = updates.next().await {
            let Update::Event(event) = update? else { continue };
            screen.event(&event)?;
            match watch.event(&event.body) {
                Some(Verdict::Good) => return Ok(()),
                Some(Verdict::Bad | Verdict::Asked) => bail!("the session did not come back"),
                None => {}
            }
        }
        bail!("the stream of {id} ended")
    }

    /// What a command in the session's checkout prints.
    async fn output(&self, id: &SessionId, script: &str) -> Result<String> {
        let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
        let mut lines =
            self.client.exec(id, &ExecRequest { argv, ..ExecRequest::default() }).await?;
        let mut printed = Vec::new();
        while let Some(line) = lines.json::<ExecLine>().await? {
            match line {
                ExecLine::Stdout { data } => printed.extend(BASE64_STANDARD.decode(data)?),
                ExecLine::Stderr { .. } | ExecLine::Started { .. } => {}
                ExecLine::Exited { .. } => {
                    return Ok(String::from_utf8_lossy(&printed).into_owned());
                }
                ExecLine::Failed { message, .. } => bail!("`{script}` could not be run: {message}"),
            }
        }
        bail!("the server went away before `{script}` ended")
    }
}
