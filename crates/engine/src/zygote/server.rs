//! The zygote's loop: one poll over its listener, its clients and its sandboxes. Nothing in it waits
//! for a client, so a broken one can neither stop nor kill it.

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
    nursery::{Nursery, Told},
    protocol::{Answer, Build, Request, receive, send},
};
use crate::{
    error::{Doing, StepError},
    home::Home,
};

// With nothing to look after it goes; the next request starts another one.
const IDLE: Duration = Duration::from_secs(60);
const CUT_LOGS_EVERY: Duration = Duration::from_secs(30);
// Whoever waits for a sandbox's end is a client: at least these, and half of all files where that is more.
const MIN_CLIENTS: u64 = 400;

// Longer than a burst's gaps, shorter than what a person or an agent takes between two starts.
const QUIET: Duration = Duration::from_millis(50);

struct Client {
    socket: OwnedFd,
    waits: Option<Waits>,
    /// It asked only how things are.
    only_looks: bool,
}

/// What a client is to be told of.
#[derive(PartialEq, Eq)]
enum Waits {
    Start(SandboxId),
    End(SandboxId),
    Still(SandboxId),
}

pub(super) struct Server {
    home: Home,
    /// What we were started from.
    build: Option<Build>,
    listener: Option<OwnedFd>,
    nursery: Nursery,
    clients: BTreeMap<u64, Client>,
    max_clients: usize,
    next_client: u64,
    idle_since: Instant,
    last_request: Instant,
    logs_cut: Instant,
    resting: bool,
}

enum Ready {
    Listener,
    Client(u64),
    Report(SandboxId),
    End(SandboxId),
    Owner(SandboxId),
    Weighed,
}

impl Server {
    pub(super) fn listen(
        home: Home,
        build: Option<Build>,
        nursery: Nursery,
    ) -> Result<Self, StepError> {
        let listener = bound(&home).doing(|| format!("listen in {}", home.run().display()))?;
        let now = Instant::now();
        Ok(Self {
            home,
            build,
            listener: Some(listener),
            nursery,
            clients: BTreeMap::new(),
            max_clients: max_clients(),
            next_client: 0,
            idle_since: now,
            last_request: now,
            logs_cut: now,
            resting: false,
        })
    }

    /// Serves until there has been nothing to do for a while.
    pub(super) fn run(&mut self) {
        loop {
            let now = Instant::now();
            let (told, next) = self.nursery.tick(now);
            self.tell(told);
            if now.duration_since(self.logs_cut) > CUT_LOGS_EVERY {
                self.logs_cut = now;
                self.nursery.cut_logs();
            }
            // Who asked for rest may hold the connection still; a sandbox is never left alone.
            let idle = self.nursery.is_empty()
                && (self.resting || self.clients.values().all(|one| one.only_looks));
            if !idle {
                self.idle_since = now;
            }
            let idle_end = self.idle_since + if self.resting { Duration::ZERO } else { IDLE };
            if idle && idle_end <= now && self.close_when_unwanted() {
                return;
            }
            // Once nobody has asked for anything for a moment: growing a seed holds up who asks.
            // One at a time, and a look at who asks in between.
            let grow_at = self.last_request + QUIET;
            let grew = grow_at <= now && !self.resting && self.nursery.grow_seed(now);
            let wake = [
                next,
                grew.then_some(now),
                (grow_at > now).then_some(grow_at),
                Some(now + CUT_LOGS_EVERY),
                idle.then_some(idle_end.max(now)),
            ];
            let until = wake.into_iter().flatten().min().unwrap_or(now);
            for ready in self.wait(until.saturating_duration_since(now)) {
                self.handle(ready);
            }
        }
    }

    /// Stops listening, unless somebody has dialled at the last moment.
    fn close_when_unwanted(&mut self) -> bool {
        let _ = fs::remove_file(self.home.zygote_socket());
        if self.accept() {
            // Found us just in time: listen again under the same name.
            self.resting = false;
            self.listener = bound(&self.home).ok();
            return false;
        }
        self.nursery.leave();
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
        for (id, live) in &self.nursery.live {
            // Before the end: a pid 1 that fails says why and dies.
            watched.extend(
                live.report.as_ref().map(|report| (report.as_fd(), Ready::Report(id.clone()))),
            );
            // One that is being cleared is looked at by the clock: it would be ready all the time.
            watched.extend(live.dies_yet().map(|pidfd| (pidfd.as_fd(), Ready::End(id.clone()))));
        }
        watched.extend(
            self.nursery.owners.iter().map(|(id, owner)| (owner.as_fd(), Ready::Owner(id.clone()))),
        );
        watched.extend(self.nursery.scales().map(|scales| (scales.as_fd(), Ready::Weighed)));
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
            .map(|((_, meant), _)| meant)
            .collect()
    }

    fn handle(&mut self, ready: Ready) {
        match ready {
            Ready::Listener => {
                // Who dials asks at once, as a rule.
                let key = self.next_client;
                if self.accept() {
                    self.request(key);
                }
            }
            Ready::Client(key) => self.request(key),
            Ready::Report(id) => {
                let told = self.nursery.reported(&id);
                self.tell(told);
            }
            Ready::End(id) => {
                let told = self.nursery.ended(&id);
                self.tell(told);
            }
            Ready::Owner(id) => self.nursery.owner_ended(&id),
            Ready::Weighed => self.nursery.weighed(),
        }
    }

    fn accept(&mut self) -> bool {
        let Some(listener) = &self.listener else { return false };
        let Ok(socket) = accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) else {
            return false;
        };
        // The folder keeps others out already.
        if !sockopt::socket_peercred(&socket)
            .is_ok_and(|peer| peer.uid == rustix::process::geteuid())
        {
            return false;
        }
        self.clients.insert(self.next_client, Client { socket, waits: None, only_looks: false });
        self.next_client += 1;
        true
    }

    fn request(&mut self, key: u64) {
        let Some(client) = self.clients.get_mut(&key) else { return };
        match receive(&client.socket) {
            Ok(Some((request, files))) => {
                client.only_looks = matches!(request, Request::Seeds);
                if !client.only_looks {
                    self.last_request = Instant::now();
                }
                if let Some(answer) = self.serve(key, request, files) {
                    self.answer(key, &answer);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(None) => drop(self.clients.remove(&key)),
            Err(error) => {
                self.answer(
                    key,
                    &Answer::Failed { reason: format!("the request cannot be read: {error}") },
                );
                self.clients.remove(&key);
            }
        }
    }

    /// The answer, unless it comes later.
    fn serve(&mut self, key: u64, request: Request, files: Vec<OwnedFd>) -> Option<Answer> {
        match request {
            Request::Ping => Some(Answer::Done),
            Request::Seeds => Some(Answer::Seeds(self.nursery.seed_counts())),
            Request::Rest => {
                self.resting = true;
                Some(Answer::Done)
            }
            Request::Start { build, .. } if self.is_outdated(build.as_ref()) => {
                self.resting = true;
                Some(Answer::Outdated)
            }
            Request::Start { record, layers, resolv_conf, again, .. } => {
                self.resting = false;
                let id = record.id.clone();
                match self.nursery.start(*record, &layers, resolv_conf, files, again) {
                    Ok(()) => self.wait_for(key, Waits::Start(id)),
                    Err(error) => Some(Answer::Failed { reason: error.line() }),
                }
            }
            Request::Wait { id } => {
                if self.nursery.live.contains_key(&id) {
                    return self.wait_for(key, Waits::End(id));
                }
                Some(
                    self.nursery
                        .end_of(&id)
                        .map_or(Answer::Unknown, |reason| Answer::Ended { reason }),
                )
            }
            Request::Kill { id } => {
                if self.nursery.kill(&id) {
                    return self.wait_for(key, Waits::End(id));
                }
                self.nursery.forgo(&id);
                Some(Answer::Done)
            }
            Request::Release { volume } => {
                self.nursery.holds.release(&volume);
                Some(Answer::Done)
            }
            Request::Freeze { id, hold_millis } => match self.nursery.freeze(&id, hold_millis) {
                Some(Ok(())) => self.wait_for(key, Waits::Still(id)),
                result => Some(done(result)),
            },
            Request::Thaw { id } => {
                let result = self.nursery.thaw(&id);
                let reason = "it was thawed".to_owned();
                self.answer_all(&Waits::Still(id), &Answer::Failed { reason });
                Some(done(result))
            }
        }
    }

    /// Whether the next zygote would be of another build, and nothing keeps it from taking our place.
    fn is_outdated(&mut self, wanted: Option<&Build>) -> bool {
        let other = matches!((wanted, &self.build), (Some(wanted), Some(own)) if wanted != own);
        other && self.nursery.is_empty()
    }

    fn wait_for(&mut self, key: u64, waits: Waits) -> Option<Answer> {
        if let Some(client) = self.clients.get_mut(&key) {
            client.waits = Some(waits);
        }
        None
    }

    fn tell(&mut self, told: impl IntoIterator<Item = Told>) {
        for told in told {
            match told {
                Told::Started { id, pid } => {
                    self.answer_all(&Waits::Start(id), &Answer::Started { pid })
                }
                Told::Ended { id, reason } => {
                    if self.nursery.is_ownerless(&id) {
                        self.nursery.discard(&id);
                    }
                    self.answer_all(
                        &Waits::Start(id.clone()),
                        &Answer::Failed { reason: reason.clone() },
                    );
                    self.answer_all(&Waits::Still(id.clone()), &Answer::Unknown);
                    self.answer_all(&Waits::End(id), &Answer::Ended { reason });
                }
                Told::Still { id, result } => {
                    self.answer_all(&Waits::Still(id), &done(Some(result)))
                }
            }
        }
    }

    fn answer_all(&mut self, waits: &Waits, answer: &Answer) {
        let waiting =
            self.clients.iter().filter(|(_, client)| client.waits.as_ref() == Some(waits));
        for key in waiting.map(|(key, _)| *key).collect::<Vec<_>>() {
            self.answer(key, answer);
        }
    }

    /// A client that does not take its answer at once is let go: answers are a line long.
    fn answer(&mut self, key: u64, answer: &Answer) {
        let Some(client) = self.clients.get_mut(&key) else { return };
        client.waits = None;
        if send(&client.socket, answer, &[]).is_err() {
            self.clients.remove(&key);
        }
    }
}

fn done(result: Option<Result<(), StepError>>) -> Answer {
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

fn bound(home: &Home) -> io::Result<OwnedFd> {
    let path = home.zygote_socket();
    let _ = fs::remove_file(&path);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // By a short name: a socket's path may have 107 bytes only.
    rustix::process::chdir(home.run())?;
    let result = SocketAddrUnix::new("zygote.sock").and_then(|address| bind(&socket, &address));
    rustix::process::chdir("/")?;
    result?;
    listen(&socket, 1024)?;
    Ok(socket)
}
