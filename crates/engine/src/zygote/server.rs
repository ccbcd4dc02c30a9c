//! The zygote's event loop: one poll over its listener, its clients and its sandboxes. It never
//! blocks on a client, so a broken client can neither stall nor kill it.

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use harvest_proto::SandboxId;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen,
        socket_with, sockopt,
    },
    process::{Resource, getrlimit},
};

use super::{
    protocol::{Answer, BuildId, Request},
    sandbox_table::{Event, SandboxTable},
};
use crate::{
    error::{Doing, StepError},
    fd_passing::{receive, send},
    home::Home,
};

// An idle zygote exits; the next request starts another one.
const IDLE: Duration = Duration::from_secs(60);
const TRUNCATE_LOGS_EVERY: Duration = Duration::from_secs(30);
// Every waiting client has a connection: at least these, or half of all files where that is more.
const MIN_CLIENTS: u64 = 400;

// Longer than the gaps within a burst, shorter than the time between two starts of a person or an
// agent.
const PREFORK_PAUSE: Duration = Duration::from_millis(50);

struct Client {
    socket: OwnedFd,
    awaits: Option<Awaited>,
    /// The client only reads counts, which does not keep the zygote alive.
    is_observer: bool,
}

/// What a client waits for.
#[derive(PartialEq, Eq)]
enum Awaited {
    Start(SandboxId),
    End(SandboxId),
    Freeze(SandboxId),
}

pub(super) struct Server {
    home: Home,
    /// The program this zygote runs.
    build: Option<BuildId>,
    listener: Option<OwnedFd>,
    table: SandboxTable,
    clients: BTreeMap<u64, Client>,
    max_clients: usize,
    next_client: u64,
    idle_since: Instant,
    last_request: Instant,
    logs_truncated: Instant,
    exiting: bool,
}

enum Ready {
    Listener,
    Client(u64),
    Report(SandboxId),
    End(SandboxId),
    Owner(SandboxId),
    ScanResults,
}

impl Server {
    pub(super) fn listen(
        home: Home,
        build: Option<BuildId>,
        table: SandboxTable,
    ) -> Result<Self, StepError> {
        let listener =
            bind_listener(&home).doing(|| format!("listen in {}", home.run().display()))?;
        let now = Instant::now();
        Ok(Self {
            home,
            build,
            listener: Some(listener),
            table,
            clients: BTreeMap::new(),
            max_clients: max_clients(),
            next_client: 0,
            idle_since: now,
            last_request: now,
            logs_truncated: now,
            exiting: false,
        })
    }

    /// Serves until the zygote has been idle for [`IDLE`] or was told to exit.
    pub(super) fn run(&mut self) {
        loop {
            let now = Instant::now();
            let (events, next) = self.table.tick(now);
            self.notify(events);
            if now.duration_since(self.logs_truncated) > TRUNCATE_LOGS_EVERY {
                self.logs_truncated = now;
                self.table.truncate_logs();
            }
            // A client that asked for the exit may still be connected; a sandbox always keeps the
            // zygote alive.
            let idle = self.table.is_empty()
                && (self.exiting || self.clients.values().all(|client| client.is_observer));
            if !idle {
                self.idle_since = now;
            }
            let idle_end = self.idle_since + if self.exiting { Duration::ZERO } else { IDLE };
            if idle && idle_end <= now && self.close_if_unused() {
                return;
            }
            // Prefork only after a pause in requests, because forking delays answers. One standby
            // per round, so that requests are seen in between.
            let prefork_at = self.last_request + PREFORK_PAUSE;
            let preforked = prefork_at <= now && !self.exiting && self.table.prefork_standby(now);
            let wake = [
                next,
                preforked.then_some(now),
                (prefork_at > now).then_some(prefork_at),
                Some(now + TRUNCATE_LOGS_EVERY),
                idle.then_some(idle_end.max(now)),
            ];
            let until = wake.into_iter().flatten().min().unwrap_or(now);
            for ready in self.wait(until.saturating_duration_since(now)) {
                self.handle(ready);
            }
        }
    }

    /// Stops listening, unless a client connected at the last moment.
    fn close_if_unused(&mut self) -> bool {
        let _ = fs::remove_file(self.home.zygote_socket());
        if self.accept() {
            // A client connected just in time: listen again under the same name.
            self.exiting = false;
            self.listener = bind_listener(&self.home).ok();
            return false;
        }
        self.table.shut_down();
        true
    }

    fn wait(&self, timeout: Duration) -> Vec<Ready> {
        let mut watched: Vec<(BorrowedFd<'_>, Ready)> = Vec::new();
        if let Some(listener) =
            self.listener.as_ref().filter(|_| self.clients.len() < self.max_clients)
        {
            watched.push((listener.as_fd(), Ready::Listener));
        }
        watched.extend(
            self.clients.iter().map(|(key, client)| (client.socket.as_fd(), Ready::Client(*key))),
        );
        for (id, live) in &self.table.live {
            // The report comes before the end: a pid 1 that fails reports the error and dies.
            watched.extend(
                live.report.as_ref().map(|report| (report.as_fd(), Ready::Report(id.clone()))),
            );
            // A dead sandbox whose cgroups are being cleared is polled by time: its pidfd stays
            // readable.
            watched.extend(live.live_pidfd().map(|pidfd| (pidfd.as_fd(), Ready::End(id.clone()))));
        }
        watched.extend(
            self.table.owners.iter().map(|(id, owner)| (owner.as_fd(), Ready::Owner(id.clone()))),
        );
        watched.extend(self.table.scan_output().map(|output| (output.as_fd(), Ready::ScanResults)));
        let mut polled: Vec<PollFd<'_>> =
            watched.iter().map(|(file, _)| PollFd::new(file, PollFlags::IN)).collect();
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        if poll(&mut polled, Some(&timeout)).is_err() {
            return Vec::new();
        }
        let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        watched
            .into_iter()
            .zip(ready)
            .filter(|(_, ready)| *ready)
            .map(|((_, source), _)| source)
            .collect()
    }

    fn handle(&mut self, ready: Ready) {
        match ready {
            Ready::Listener => {
                // A client usually sends its request right after connecting.
                let key = self.next_client;
                if self.accept() {
                    self.request(key);
                }
            }
            Ready::Client(key) => self.request(key),
            Ready::Report(id) => {
                let event = self.table.on_report(&id);
                self.notify(event);
            }
            Ready::End(id) => {
                let event = self.table.ended(&id);
                self.notify(event);
            }
            Ready::Owner(id) => self.table.owner_ended(&id),
            Ready::ScanResults => self.table.enforce_disk_limits(),
        }
    }

    fn accept(&mut self) -> bool {
        let Some(listener) = &self.listener else { return false };
        let Ok(socket) = accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) else {
            return false;
        };
        // Defence in depth: the folder's permissions already exclude other users.
        if !sockopt::socket_peercred(&socket)
            .is_ok_and(|peer| peer.uid == rustix::process::geteuid())
        {
            return false;
        }
        self.clients.insert(self.next_client, Client { socket, awaits: None, is_observer: false });
        self.next_client += 1;
        true
    }

    fn request(&mut self, key: u64) {
        let Some(client) = self.clients.get_mut(&key) else { return };
        match receive(&client.socket) {
            Ok(Some((request, files))) => {
                client.is_observer = matches!(request, Request::StandbyCounts);
                if !client.is_observer {
                    self.last_request = Instant::now();
                }
                if let Some(answer) = self.serve(key, request, files) {
                    self.answer(key, &answer);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(None) => drop(self.clients.remove(&key)),
            Err(error) => {
                self.answer(key, &Answer::Failed { reason: format!("invalid request: {error}") });
                self.clients.remove(&key);
            }
        }
    }

    /// Handles a request; `None` when the answer comes later.
    fn serve(&mut self, key: u64, request: Request, files: Vec<OwnedFd>) -> Option<Answer> {
        match request {
            Request::Ping => Some(Answer::Done),
            Request::StandbyCounts => Some(Answer::StandbyCounts(self.table.standby_counts())),
            Request::ExitIfIdle => {
                self.exiting = true;
                Some(Answer::Done)
            }
            Request::Start { build, .. } if self.is_outdated(build.as_ref()) => {
                self.exiting = true;
                Some(Answer::Outdated)
            }
            Request::Start { record, layers, resolv_conf, restart, .. } => {
                self.exiting = false;
                let id = record.id.clone();
                match self.table.start(*record, &layers, resolv_conf, files, restart) {
                    Ok(()) => self.wait_for(key, Awaited::Start(id)),
                    Err(error) => Some(Answer::Failed { reason: error.line() }),
                }
            }
            Request::Wait { id } => {
                if self.table.live.contains_key(&id) {
                    return self.wait_for(key, Awaited::End(id));
                }
                Some(
                    self.table
                        .end_reason(&id)
                        .map_or(Answer::Unknown, |reason| Answer::Ended { reason }),
                )
            }
            Request::Kill { id } => {
                if self.table.kill(&id) {
                    return self.wait_for(key, Awaited::End(id));
                }
                self.table.mark_never_started(&id);
                Some(Answer::Done)
            }
            Request::Release { volume } => {
                self.table.mount_cache.release(&volume);
                Some(Answer::Done)
            }
            Request::Freeze { id, hold_millis } => match self.table.freeze(&id, hold_millis) {
                Some(Ok(())) => self.wait_for(key, Awaited::Freeze(id)),
                result => Some(answer_for(result)),
            },
            Request::Thaw { id } => {
                let result = self.table.thaw(&id);
                let reason = "the sandbox was thawed meanwhile".to_owned();
                self.answer_all(&Awaited::Freeze(id), &Answer::Failed { reason });
                Some(answer_for(result))
            }
        }
    }

    /// Whether a new zygote would be another build and nothing keeps this one from exiting.
    fn is_outdated(&mut self, wanted: Option<&BuildId>) -> bool {
        let other = matches!((wanted, &self.build), (Some(wanted), Some(own)) if wanted != own);
        other && self.table.is_empty()
    }

    fn wait_for(&mut self, key: u64, awaits: Awaited) -> Option<Answer> {
        if let Some(client) = self.clients.get_mut(&key) {
            client.awaits = Some(awaits);
        }
        None
    }

    fn notify(&mut self, events: impl IntoIterator<Item = Event>) {
        for event in events {
            match event {
                Event::Started { id, pid } => {
                    self.answer_all(&Awaited::Start(id), &Answer::Started { pid })
                }
                Event::Ended { id, reason } => {
                    if self.table.is_orphaned(&id) {
                        self.table.discard(&id);
                    }
                    self.answer_all(
                        &Awaited::Start(id.clone()),
                        &Answer::Failed { reason: reason.clone() },
                    );
                    self.answer_all(&Awaited::Freeze(id.clone()), &Answer::Unknown);
                    self.answer_all(&Awaited::End(id), &Answer::Ended { reason });
                }
                Event::FreezeDone { id, result } => {
                    self.answer_all(&Awaited::Freeze(id), &answer_for(Some(result)))
                }
            }
        }
    }

    fn answer_all(&mut self, awaits: &Awaited, answer: &Answer) {
        let waiting =
            self.clients.iter().filter(|(_, client)| client.awaits.as_ref() == Some(awaits));
        for key in waiting.map(|(key, _)| *key).collect::<Vec<_>>() {
            self.answer(key, answer);
        }
    }

    /// A client that does not accept its answer at once is disconnected: answers are one line.
    fn answer(&mut self, key: u64, answer: &Answer) {
        let Some(client) = self.clients.get_mut(&key) else { return };
        client.awaits = None;
        if send(&client.socket, answer, &[]).is_err() {
            self.clients.remove(&key);
        }
    }
}

fn answer_for(result: Option<Result<(), StepError>>) -> Answer {
    match result {
        Some(Ok(())) => Answer::Done,
        Some(Err(error)) => Answer::Failed { reason: error.line() },
        None => Answer::Unknown,
    }
}

fn max_clients() -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from((files / 2).max(MIN_CLIENTS)).unwrap_or(usize::MAX)
}

fn bind_listener(home: &Home) -> io::Result<OwnedFd> {
    let path = home.zygote_socket();
    let _ = fs::remove_file(&path);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // By a relative name: a socket path is limited to 107 bytes.
    rustix::process::chdir(home.run())?;
    let result = SocketAddrUnix::new("zygote.sock").and_then(|address| bind(&socket, &address));
    rustix::process::chdir("/")?;
    result?;
    listen(&socket, 1024)?;
    Ok(socket)
}
