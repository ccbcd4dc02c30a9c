//! A supervisor as an ordinary process, and a client that records everything it receives.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    net::{Ipv4Addr, UdpSocket},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command as Process, Stdio},
    time::{Duration, Instant},
};

use harvest_proto::{
    AgentName, EventBody, PromptId, SandboxId, SessionId, TurnId,
    bridge::*,
    event::{BootPhase, PhaseStatus, TurnOutcome},
    launch::{Descriptor, Launch, NetworkSettings},
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::cgroups::Cgroups;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A supervisor in a temporary folder.
pub(crate) struct Sandbox {
    folder: tempfile::TempDir,
    pub(crate) process: Child,
    pub(crate) dns: std::net::SocketAddr,
}

impl Sandbox {
    pub(crate) fn start() -> Self {
        Self::start_in(None)
    }

    /// With real cgroups, or with plain files instead.
    pub(crate) fn start_in(groups: Option<&Cgroups>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["bin", "door", "home", "workspace"] {
            fs::create_dir(at(name)).unwrap();
        }
        for (program, script) in [
            ("bin/claude", include_str!("fake-claude.sh")),
            ("bin/opencode", include_str!("fake-opencode.sh")),
            ("bin/codex", include_str!("fake-codex.sh")),
        ] {
            fs::write(at(program), script).unwrap();
            fs::set_permissions(at(program), fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::write(at("oom"), "oom_kill 0\n").unwrap();
        let open = |name: &str| {
            let file = File::options().create(true).append(true).read(true).open(at(name)).unwrap();
            OwnedFd::from(file)
        };
        let dns = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = dns.local_addr().unwrap();
        let plain = || {
            vec![
                (Descriptor::JoinCommands, open("join-commands")),
                (Descriptor::JoinAgent, open("join-agent")),
                (Descriptor::AgentProcs, open("agent-procs")),
            ]
        };
        let mut descriptors: Vec<(Descriptor, OwnedFd)> = vec![
            (Descriptor::Bridge, UnixListener::bind(at("bridge.sock")).unwrap().into()),
            (Descriptor::OomCount, File::open(at("oom")).unwrap().into()),
            (Descriptor::Door, File::open(at("door")).unwrap().into()),
            (Descriptor::DnsUdp, dns.into()),
        ];
        descriptors.extend(groups.map_or_else(plain, Cgroups::descriptors));
        let launch = Launch {
            sandbox: SandboxId::random(),
            descriptors: descriptors.iter().map(|(kind, _)| *kind).collect(),
            env: BTreeMap::from([
                ("HOME".to_owned(), at("home").display().to_string()),
                (
                    "PATH".to_owned(),
                    format!("{}:/usr/local/bin:/usr/bin:/bin", at("bin").display()),
                ),
                ("HARVEST_WORKSPACE".to_owned(), at("workspace").display().to_string()),
            ]),
            user: "harvest".to_owned(),
            workdir: "/".to_owned(),
            sealed: false,
            file_bytes: None,
            cpus: Vec::new(),
            settings: NetworkSettings::default(),
        };
        let (ours, theirs) = UnixStream::pair().unwrap();
        let process = Process::new(env!("CARGO_BIN_EXE_harvest-supervisor"))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .unwrap();
        let rights: Vec<_> = descriptors.iter().map(|(_, descriptor)| descriptor.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&rights)));
        let text = serde_json::to_vec(&launch).unwrap();
        rustix::net::sendmsg(&ours, &[IoSlice::new(&text)], &mut ancillary, SendFlags::empty())
            .unwrap();
        Self { folder, process, dns: address }
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn dial(&self, role: BridgeRole) -> Client {
        self.dial_with_heartbeat(role, None)
    }

    pub(crate) fn dial_with_heartbeat(
        &self,
        role: BridgeRole,
        heartbeat_millis: Option<u64>,
    ) -> Client {
        let stream = UnixStream::connect(self.at("bridge.sock")).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut client = Client::new(stream);
        if let BridgeRole::Owner { stored, .. } = &role {
            client.stored = *stored;
        }
        client.send(ToSupervisor::Hello { version: VERSION, role, heartbeat_millis });
        client
    }

    pub(crate) fn client(&self) -> Client {
        let mut client = self.dial(BridgeRole::Client);
        client.welcome().expect("the client is welcome");
        client
    }

    pub(crate) fn owner(&self, lease: u64, stored: u64) -> Client {
        let mut client = self.dial(BridgeRole::Owner { lease, epoch: 1, stored });
        client.welcome().expect("the owner is welcome");
        client
    }

    pub(crate) fn memory_kib(&self, field: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// A boot from a bare repository with one commit, which is created if needed.
    pub(crate) fn boot(&self, start: BootStart, files: &[(&str, &str)]) -> Boot {
        let (bare, work) = (self.at("origin.git"), self.at("origin-work"));
        if !bare.exists() {
            git(self.folder.path(), &["init", "-q", "--bare", "-b", "main", "origin.git"]);
            git(self.folder.path(), &["clone", "-q", "origin.git", "origin-work"]);
            for (name, text) in [("README", "hello\n")].iter().chain(files) {
                fs::create_dir_all(work.join(name).parent().unwrap()).unwrap();
                fs::write(work.join(name), text).unwrap();
            }
            git(&work, &["add", "."]);
            git(&work, &["commit", "-q", "-m", "first"]);
            git(&work, &["push", "-q", "origin", "HEAD:main"]);
        }
        Boot {
            session: SessionId::random(),
            epoch: 1,
            start,
            author: Some(Author { name: "Ada".into(), email: "ada@example.org".into() }),
            repositories: vec![Checkout {
                name: "acme/shop".parse().unwrap(),
                folder: "shop".parse().unwrap(),
                remote: format!("file://{}", bare.display()),
                url: None,
                base: None,
                branch: Some("harvest/work".parse().unwrap()),
                clone_missing: false,
            }],
            agent: Some(AgentLaunch {
                effort: None,
                name: AgentName::Claude,
                program: None,
                conversation: "0b5a7e0e-1111-4111-8111-111111111111".into(),
                resume: false,
                model: None,
                upstream: harvest_proto::UpstreamName::anthropic(),
                protocol: ModelProtocol::Messages,
                questions: true,
                silence_millis: 600_000,
                restarts: RestartPolicy { first_millis: 1, ..RestartPolicy::default() },
            }),
            git_hosts: Vec::new(),
            mcp_servers: Vec::new(),
            env: BTreeMap::from([("GREETING".to_owned(), "hi".to_owned())]),
            hook_millis: None,
            standby: false,
        }
    }

    /// Pushes a commit that changes this file to the origin's base; returns its id.
    pub(crate) fn commit(&self, name: &str, text: &str) -> String {
        let work = self.at("origin-work");
        let path = work.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        git(&work, &["add", "."]);
        git(&work, &["commit", "-q", "-m", name]);
        git(&work, &["push", "-q", "origin", "HEAD:main"]);
        git(&work, &["rev-parse", "HEAD"])
    }

    pub(crate) fn booted(&self, client: &mut Client) {
        self.booted_with(client, AgentName::Claude);
    }

    pub(crate) fn booted_with(&self, client: &mut Client, agent: AgentName) {
        self.boot_with(client, agent);
        client.phase(BootPhase::Ready, PhaseStatus::Done);
    }

    pub(crate) fn boot_with(&self, client: &mut Client, agent: AgentName) {
        let mut boot = self.boot(BootStart::Fresh, &[]);
        boot.agent.as_mut().unwrap().name = agent;
        assert_eq!(
            client.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }),
            Ok(Reply::Done)
        );
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // Its descendants die with it: the launchers see their sockets close.
        let _gone = self.process.kill();
        let _gone = self.process.wait();
    }
}

pub(crate) fn git(folder: &Path, arguments: &[&str]) -> String {
    let done = Process::new("git")
        .current_dir(folder)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .args(["-c", "user.name=T", "-c", "user.email=t@localhost", "-c", "safe.directory=*"])
        .args(arguments)
        .output()
        .unwrap();
    assert!(done.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).trim().to_owned()
}

/// A client that records everything it receives.
pub(crate) struct Client {
    pub(crate) stream: UnixStream,
    pub(crate) decoder: Decoder,
    pub(crate) next: u64,
    pub(crate) replies: HashMap<u64, Result<Reply, Fault>>,
    pub(crate) exits: HashMap<u64, Exit>,
    pub(crate) data: HashMap<StreamId, Vec<u8>>,
    pub(crate) ended: Vec<StreamId>,
    pub(crate) welcome: Option<Status>,
    pub(crate) events: Vec<OutboxEvent>,
    pub(crate) stored: u64,
    pub(crate) heartbeats: u32,
    pub(crate) pongs: u32,
    /// The count in the last heartbeat.
    pub(crate) detached: Option<u32>,
    /// CommandStreams that get no credit by themselves, and what has arrived on them.
    pub(crate) withheld: HashMap<StreamId, u64>,
}

impl Client {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            decoder: Decoder::default(),
            next: 0,
            replies: HashMap::new(),
            exits: HashMap::new(),
            data: HashMap::new(),
            ended: Vec::new(),
            welcome: None,
            events: Vec::new(),
            stored: 0,
            heartbeats: 0,
            pongs: 0,
            detached: None,
            withheld: HashMap::new(),
        }
    }

    pub(crate) fn send(&mut self, message: ToSupervisor) {
        self.stream.write_all(&Frame::Control(message).encode()).unwrap();
    }

    pub(crate) fn data(&mut self, stream: StreamId, bytes: &[u8]) {
        for chunk in bytes.chunks(MAX_DATA_BYTES) {
            self.stream
                .write_all(&Frame::<ToSupervisor>::Data { stream, bytes: chunk.to_vec() }.encode())
                .unwrap();
        }
    }

    /// Reads once; false when the supervisor has closed the connection.
    pub(crate) fn read(&mut self) -> bool {
        let mut chunk = [0u8; 64 * 1024];
        let count = match self.stream.read(&mut chunk) {
            Ok(0) => return false,
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return false,
            Err(error) => {
                panic!("timed out: {error}; events: {:#?}", self.events)
            }
        };
        self.decoder.push(&chunk[..count]);
        while let Some(frame) = self.decoder.take::<FromSupervisor>().unwrap() {
            self.record(frame);
        }
        true
    }

    pub(crate) fn record(&mut self, frame: Frame<FromSupervisor>) {
        match frame {
            Frame::Data { stream, bytes } => {
                if let Some(count) = self.withheld.get_mut(&stream) {
                    *count += bytes.len() as u64;
                } else {
                    let granted = u32::try_from(bytes.len()).unwrap();
                    self.data.entry(stream).or_default().extend(bytes);
                    self.send(ToSupervisor::Credit { stream, bytes: granted });
                }
            }
            Frame::Control(FromSupervisor::Welcome { status, .. }) => self.welcome = Some(status),
            Frame::Control(FromSupervisor::Reply { id, result }) => {
                self.replies.insert(id, result);
            }
            Frame::Control(FromSupervisor::Exited { exec, exit, .. }) => {
                self.exits.insert(exec, exit);
            }
            Frame::Control(FromSupervisor::End { stream }) => self.ended.push(stream),
            Frame::Control(FromSupervisor::Event(event)) => {
                assert_eq!(event.number, self.stored + 1, "a gap or a repeat");
                self.stored = event.number;
                self.events.push(event);
            }
            Frame::Control(FromSupervisor::Credit { .. }) => {}
            Frame::Control(FromSupervisor::Pong) => self.pongs += 1,
            Frame::Control(FromSupervisor::Heartbeat { detached, .. }) => {
                self.heartbeats += 1;
                self.detached = Some(detached);
            }
        }
    }

    pub(crate) fn until<T>(&mut self, mut found: impl FnMut(&mut Self) -> Option<T>) -> T {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(found) = found(self) {
                return found;
            }
            assert!(
                self.read() && Instant::now() < deadline,
                "the supervisor closed; events: {:#?}",
                self.events
            );
        }
    }

    pub(crate) fn welcome(&mut self) -> Option<Status> {
        while self.welcome.is_none() && self.read() {}
        self.welcome.clone()
    }

    pub(crate) fn request(
        &mut self,
        message: impl FnOnce(RequestId) -> ToSupervisor,
    ) -> Result<Reply, Fault> {
        self.next += 1;
        let id = self.next;
        self.send(message(id));
        self.until(|client| client.replies.remove(&id))
    }

    /// Starts a command; returns its id, from which its stream ids derive.
    pub(crate) fn exec(&mut self, command: Command) -> Result<u64, Fault> {
        let streams = u32::try_from((self.next + 1) * 10).unwrap();
        let mut command = Command { stdout: streams + 1, stderr: streams + 2, ..command };
        command.stdin = command.stdin.map(|_| streams);
        self.request(|id| ToSupervisor::Exec { id, command: Box::new(command) })?;
        Ok(self.next)
    }

    pub(crate) fn exit(&mut self, exec: u64) -> Exit {
        let exit = self.until(|client| client.exits.remove(&exec));
        let streams = u32::try_from(exec * 10).unwrap();
        assert!(
            self.ended.contains(&(streams + 1)) && self.ended.contains(&(streams + 2)),
            "streams end before the exit"
        );
        exit
    }

    pub(crate) fn stdout(&self, exec: u64) -> String {
        let stream = u32::try_from(exec * 10 + 1).unwrap();
        String::from_utf8_lossy(self.data.get(&stream).map_or(&[][..], Vec::as_slice)).into_owned()
    }

    /// Writes to the command's stdin.
    pub(crate) fn type_in(&mut self, exec: u64, text: &str) {
        self.data(u32::try_from(exec * 10).unwrap(), text.as_bytes());
    }

    /// Waits until the command's output contains this text.
    pub(crate) fn wait_for_output(&mut self, exec: u64, wanted: &str) {
        self.until(|client| client.stdout(exec).contains(wanted).then_some(()));
    }

    pub(crate) fn sh(&mut self, script: &str) -> (Exit, String) {
        let exec = self.exec(sh(script)).unwrap();
        (self.exit(exec), self.stdout(exec))
    }

    pub(crate) fn event(&mut self, wanted: impl Fn(&EventBody) -> bool) -> EventBody {
        self.until(|client| {
            let found = client.events.iter().position(|event| wanted(&event.body))?;
            let body = client.events[found].body.clone();
            client.events.drain(..=found);
            Some(body)
        })
    }

    pub(crate) fn phase(&mut self, wanted: BootPhase, status: PhaseStatus) {
        self.event(|body| {
            if let EventBody::BootPhase { status: PhaseStatus::Failed, tail, phase, .. } = body {
                assert!(status == PhaseStatus::Failed, "{phase:?} failed: {tail:?}");
            }
            matches!(
                body,
                EventBody::BootPhase { phase, status: actual, .. }
                    if *phase == wanted && *actual == status
            )
        });
    }

    pub(crate) fn prompt(&mut self, text: &str) -> (PromptId, TurnId) {
        let request = turn_request(text);
        let ids = (request.prompt.clone(), request.turn.clone());
        assert_eq!(
            self.request(|id| ToSupervisor::Prompt { id, prompt: Box::new(request) }),
            Ok(Reply::Done)
        );
        ids
    }

    pub(crate) fn turn_ended(&mut self) -> TurnOutcome {
        let body = self.event(|body| matches!(body, EventBody::TurnEnded { .. }));
        let EventBody::TurnEnded { outcome, .. } = body else { unreachable!() };
        outcome
    }

    pub(crate) fn text(&mut self, wanted: &str) {
        let wanted = wanted.to_owned();
        self.event(
            move |body| matches!(body, EventBody::TextDelta { text } if text.contains(&wanted)),
        );
    }
}

pub(crate) fn sh(script: &str) -> Command {
    Command { argv: vec!["sh".into(), "-c".into(), script.into()], ..Command::default() }
}

pub(crate) fn turn_request(text: &str) -> TurnRequest {
    TurnRequest {
        prompt: PromptId::random(),
        turn: TurnId::random(),
        number: 1,
        text: text.into(),
        images: Vec::new(),
        author: Author { name: "Ada".into(), email: "ada@example.org".into() },
        agent: None,
        history: None,
        save_work: Vec::new(),
    }
}

pub(crate) fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn parent(pid: &str) -> String {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap();
    stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().to_owned()
}

pub(crate) fn kill(pid: &str) {
    Process::new("kill").args(["-9", pid.trim()]).status().unwrap();
}
