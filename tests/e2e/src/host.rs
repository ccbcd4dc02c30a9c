//! A server with its own home in a temporary folder and a free port, and the CLI pointed at it.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use harvest_proto::{
    Event, EventBody, SessionId,
    api::{ExecLine, Page, Prompt, Session, SessionState},
    bridge::Exit,
};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::{Follower, PATIENCE, binary, eventually, sweep_after};

/// The output and exit code of a program.
#[derive(Debug)]
pub struct Ran {
    /// The exit code; -1 after a signal.
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// A home, a server and an HTTP client.
pub struct Host {
    home: tempfile::TempDir,
    server: Option<Child>,
    env: BTreeMap<String, String>,
    client: reqwest::Client,
}

impl Host {
    /// Starts a server on a new home.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Starts a server on a new home with these environment variables.
    ///
    /// # Panics
    /// When it does not come up.
    pub async fn start_with(env: &[(&str, &str)]) -> Self {
        Self::start_below(&std::env::temp_dir(), env).await
    }

    /// Starts a server on a new home below this folder.
    ///
    /// # Panics
    /// When it does not come up.
    pub async fn start_below(folder: &Path, env: &[(&str, &str)]) -> Self {
        // Fails when another test of this process installed the provider first, which is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut host = Self {
            home: tempfile::Builder::new()
                .prefix("hv")
                .tempdir_in(folder)
                .expect("a folder can be made"),
            server: None,
            env: env.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
            client: client(),
        };
        sweep_after(std::process::id(), host.home(), &host.env);
        host.up().await;
        host
    }

    /// The home folder.
    #[must_use]
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// Sets an environment variable for processes started from here on.
    pub fn set(&mut self, name: &str, value: &str) {
        self.env.insert(name.into(), value.into());
    }

    /// The CLI, not yet started.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(binary("harvest"));
        command
            .env("HARVEST_HOME", self.home.path())
            .env("NO_COLOR", "1")
            // The clock of the machine would start builds in the middle of a test.
            .env("HARVEST_SCHEDULE", "false")
            // Sandboxes that no test asked for would count in many.
            .env("HARVEST_POOL", "0")
            // Not the identity of the machine that tests run on.
            .env("HARVEST_AUTHOR_NAME", "Test")
            .env("HARVEST_AUTHOR_EMAIL", "test@example.org")
            .env_remove("HARVEST_URL");
        for key in [
            "ANTHROPIC_API_KEY",
            "GITHUB_APP_ID",
            "GITHUB_APP_PRIVATE_KEY",
            "GITHUB_TOKEN",
            "GITHUB_WEBHOOK_SECRET",
            "SENTRY_AUTH_TOKEN",
        ] {
            command.env_remove(key);
        }
        command.env_remove("LINEAR_API_KEY").env_remove("GEMINI_API_KEY").envs(&self.env);
        command
    }

    /// Starts the server and waits until it answers.
    ///
    /// # Panics
    /// When it does not.
    pub async fn up(&mut self) {
        self.launch();
        self.ready().await;
    }

    /// Starts the server without waiting for it.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn launch(&mut self) {
        let _ = fs::remove_file(self.home.path().join("server.json"));
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.home.path().join("up.log"))
            .expect("the home is ours");
        let server = self
            .command()
            .args(["up", "--keep", "--listen", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor can be doubled"))
            .stderr(log)
            .spawn()
            .expect("the server can be started");
        self.server = Some(server);
    }

    /// Waits until the server answers.
    ///
    /// # Panics
    /// When it does not.
    pub async fn ready(&self) {
        eventually("the server to answer", || async {
            self.url()?;
            let answer = self.request(Method::GET, "/readyz").send().await;
            answer.ok().filter(|answer| answer.status().is_success())
        })
        .await;
    }

    /// The server's pid.
    ///
    /// # Panics
    /// When there is no server.
    #[must_use]
    pub fn server(&self) -> u32 {
        self.server.as_ref().expect("a server runs").id()
    }

    /// Kills the server with SIGKILL.
    ///
    /// # Panics
    /// When there is no server.
    pub fn kill(&mut self) {
        let mut server = self.server.take().expect("a server runs");
        server.kill().expect("our own child can be killed");
        server.wait().expect("our own child can be reaped");
    }

    /// The URL in the server's own record.
    #[must_use]
    pub fn url(&self) -> Option<String> {
        let text = fs::read_to_string(self.home.path().join("server.json")).ok()?;
        serde_json::from_str::<Value>(&text).ok()?["url"].as_str().map(str::to_owned)
    }

    /// The server's token for the local CLI.
    #[must_use]
    pub fn token(&self) -> String {
        fs::read_to_string(self.home.path().join("token")).unwrap_or_default().trim().to_owned()
    }

    /// A request with the server's token.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let url = format!("{}{path}", self.url().unwrap_or_else(|| "http://127.0.0.1:1".into()));
        self.client.request(method, url).bearer_auth(self.token())
    }

    /// A GET with the server's token.
    pub fn get(&self, path: &str) -> RequestBuilder {
        self.request(Method::GET, path)
    }

    /// Sends a POST that must succeed and returns its JSON body.
    ///
    /// # Panics
    /// When it does not.
    pub async fn post(&self, path: &str, body: Value) -> Value {
        let answer =
            self.request(Method::POST, path).json(&body).send().await.expect("the server answers");
        let status = answer.status();
        let text = answer.text().await.expect("the answer has a body");
        assert!(status.is_success(), "POST {path} answered {status}: {text}");
        serde_json::from_str(&text).unwrap_or(Value::Null)
    }

    /// Runs the CLI against this host.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn harvest<Argument: AsRef<std::ffi::OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = Argument>,
    ) -> Ran {
        self.harvest_with(&[], arguments)
    }

    /// Runs the CLI with additional environment variables.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn harvest_with<Argument: AsRef<std::ffi::OsStr>>(
        &self,
        env: &[(&str, &str)],
        arguments: impl IntoIterator<Item = Argument>,
    ) -> Ran {
        let mut command = self.command();
        let output =
            command.envs(env.iter().copied()).args(arguments).stdin(Stdio::null()).output();
        let output = output.expect("the CLI can be started");
        Ran {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Registers and builds a repository with these files.
    ///
    /// # Panics
    /// When any step fails.
    pub async fn repository(&self, name: &str, files: &[(&str, &str)]) {
        let folder = self.home.path().join("sources").join(name);
        for (path, content) in files {
            let path = folder.join(path);
            fs::create_dir_all(path.parent().expect("a file lies in a folder"))
                .expect("the home is ours");
            fs::write(&path, content).expect("the home is ours");
        }
        git(&folder, &["init", "-q", "-b", "main"]);
        git(&folder, &["add", "-A"]);
        git(
            &folder,
            &[
                "-c",
                "user.name=Test",
                "-c",
                "user.email=test@example.org",
                "commit",
                "-qm",
                "Begin",
            ],
        );
        let added = self.harvest([
            "repo",
            "add",
            folder.to_str().expect("temporary paths are text"),
            "--name",
            name,
        ]);
        assert_eq!(added.code, 0, "{added:?}");
        let built = self.harvest(["repo", "build", name]);
        assert_eq!(built.code, 0, "{built:?}");
    }

    /// Creates a Claude Code session with the scripted model.
    ///
    /// # Panics
    /// When it is refused.
    pub async fn session(&self, repository: &str, prompt: &str, script: &Value) -> Session {
        self.session_of("claude", repository, prompt, script).await
    }

    /// Creates a session with the scripted agent, for tests that are not about an agent: it starts
    /// in milliseconds and plays the same scripts.
    ///
    /// # Panics
    /// When it is refused.
    pub async fn scripted(&self, repository: &str, prompt: &str, script: &Value) -> Session {
        self.session_of("scripted", repository, prompt, script).await
    }

    /// Creates a session with this agent and the scripted model.
    ///
    /// # Panics
    /// When it is refused.
    pub async fn session_of(
        &self,
        agent: &str,
        repository: &str,
        prompt: &str,
        script: &Value,
    ) -> Session {
        let body = json!({
            "repository": repository, "agent": agent, "model": "scripted", "network": "none",
            "prompt": format!("{prompt}\nscript: {script}"),
        });
        serde_json::from_value(self.post("/v1/sessions", body).await).expect("a session comes back")
    }

    /// Creates a session of the scripted agent without a repository: the quickest to start.
    ///
    /// # Panics
    /// When it is refused.
    pub async fn bare(&self, prompt: &str, script: &Value) -> Session {
        let prompt = format!("{prompt}\nscript: {script}");
        let body = json!({ "agent": "scripted", "network": "none", "prompt": prompt });
        serde_json::from_value(self.post("/v1/sessions", body).await).expect("a session comes back")
    }

    /// Queues another prompt.
    ///
    /// # Panics
    /// When it is refused.
    pub async fn prompt(&self, session: &SessionId, prompt: &str, script: &Value) -> Prompt {
        let body = json!({ "text": format!("{prompt}\nscript: {script}") });
        let answer = self.post(&format!("/v1/sessions/{session}/prompts"), body).await;
        serde_json::from_value(answer).expect("a prompt comes back")
    }

    /// Reads the session.
    ///
    /// # Panics
    /// When it is not there.
    pub async fn show(&self, session: &SessionId) -> Session {
        let answer =
            self.get(&format!("/v1/sessions/{session}")).send().await.expect("the server answers");
        answer.json().await.expect("a session comes back")
    }

    /// Waits until the session is in this state.
    ///
    /// # Panics
    /// When it never is.
    pub async fn wait_for(&self, session: &SessionId, state: SessionState) -> Session {
        eventually(&format!("{session} to be {}", state.as_str()), || async {
            let now = self.show(session).await;
            (now.state == state).then_some(now)
        })
        .await
    }

    /// Follows a session's events.
    #[must_use]
    pub const fn follow(&self, session: SessionId) -> Follower<'_> {
        Follower::new(self, session)
    }

    /// Reads all stored events of a session, in order.
    ///
    /// # Panics
    /// When the server does not answer, or when a sequence number is skipped or repeated.
    pub async fn events(&self, session: &SessionId) -> Vec<EventBody> {
        let (last, mut all) = (self.show(session).await.seq, Vec::new());
        while (all.len() as u64) < last {
            let path = format!("/v1/sessions/{session}/events?limit=1000&after={}", all.len());
            let page = self.get(&path).send().await.expect("the server answers");
            let page: Page<Event> = page.json().await.expect("a page comes back");
            assert!(
                !page.items.is_empty(),
                "the newest of {session} is {last}, and {} came",
                all.len()
            );
            for event in page.items {
                assert_eq!(event.seq, all.len() as u64 + 1, "a number was skipped or repeated");
                all.push(event.body);
            }
        }
        all
    }

    /// Runs a command in a session's sandbox and returns its exit and output.
    ///
    /// # Panics
    /// When it cannot be run.
    pub async fn exec(&self, session: &SessionId, user: &str, command: &str) -> (Exit, String) {
        self.exec_within(session, user, command, PATIENCE).await
    }

    /// Like [`Host::exec`] with a timeout, after which the whole process tree is killed.
    ///
    /// # Panics
    /// When it cannot be run.
    pub async fn exec_within(
        &self,
        session: &SessionId,
        user: &str,
        command: &str,
        limit: Duration,
    ) -> (Exit, String) {
        let limit = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let body = json!({ "argv": ["sh", "-c", command], "user": user, "timeout_millis": limit });
        let answer = self
            .request(Method::POST, &format!("/v1/sessions/{session}/exec"))
            .json(&body)
            .send()
            .await;
        let text = answer.expect("the server answers").text().await.expect("the stream ends well");
        let mut output = Vec::new();
        // Empty lines keep the connection of a silent command alive.
        for line in text.lines().filter(|line| !line.is_empty()) {
            match serde_json::from_str::<ExecLine>(line)
                .unwrap_or_else(|_| panic!("not an exec line: {line}"))
            {
                ExecLine::Stdout { data } | ExecLine::Stderr { data } => {
                    output.extend(decode(&data))
                }
                ExecLine::Started { .. } => {}
                ExecLine::Exited { exit, .. } => {
                    return (exit, String::from_utf8_lossy(&output).into_owned());
                }
                ExecLine::Failed { code, message } => {
                    panic!("`{command}` failed: {code}: {message}")
                }
            }
        }
        panic!("`{command}` never ended: {text}")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
        let swept = self.command().args(["gc", "--all", "--yes"]).stdin(Stdio::null()).output();
        if std::thread::panicking() {
            let log = fs::read_to_string(self.home.path().join("up.log")).unwrap_or_default();
            eprintln!("--- the server's log\n{log}--- gc\n{swept:?}");
        }
    }
}

fn git(folder: &Path, arguments: &[&str]) {
    let done = Command::new("git")
        .arg("-C")
        .arg(folder)
        .args(arguments)
        .output()
        .expect("git is installed");
    assert!(done.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
}

fn decode(data: &str) -> Vec<u8> {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.decode(data).expect("exec output is base64")
}

fn client() -> reqwest::Client {
    // A test that runs a command blocks the task which would notice that the server has closed an
    // idle connection (after 30 s): the next request would be sent on it.
    let client = reqwest::Client::builder().no_proxy().pool_idle_timeout(Duration::from_secs(20));
    client.build().expect("a client needs nothing")
}
