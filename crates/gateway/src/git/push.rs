//! Pushes: the commands are read and checked before the remote is contacted, and then what they do
//! to the branch (`lease`). A refusal is a git report, and nothing of a refused push reaches the
//! remote.

use std::{sync::Arc, time::Duration};

use bytes::BytesMut;
use futures_util::{StreamExt, stream};
use harvest_proto::EventBody;
use http_body_util::{BodyDataStream, BodyExt};
use hyper::{Response, StatusCode, body::Incoming, header, http::request::Parts};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout, timeout_at},
};

use super::{
    FROM_REMOTE, GitRequest, NothingTaken, Remote, TO_REMOTE, filter_headers,
    lease::Lease,
    pktline::{Commands, Objection, Report},
};
use crate::{
    door::Door,
    http::{self, Abort, Body},
    ledger::GitAccess,
};

const RESULT_TYPE: &str = "application/x-git-receive-pack-result";
// git sends its commands at once; only a stuck client takes longer.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
// git reads the response only after it has sent its pack, so the pack of a refused push is read and
// discarded; a larger one is cut off.
const MAX_DRAINED_BYTES: usize = 2 << 30;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(600);

pub(super) async fn answer(
    door: Arc<Door>,
    access: GitAccess,
    parts: Parts,
    mut body: Incoming,
) -> Result<Response<Body>, Abort> {
    if parts.headers.contains_key(header::CONTENT_ENCODING) {
        let reason = "compressed pushes are not supported";
        door.log_refused_push(&access.name, reason).await;
        return Ok(http::text(StatusCode::UNSUPPORTED_MEDIA_TYPE, reason));
    }
    let begun = Instant::now();
    let (commands, head) = match timeout(HEAD_TIMEOUT, read_head(&mut body)).await {
        Ok(Ok(read)) => read,
        Ok(Err(Some(reason))) => {
            door.log_refused_push(&access.name, reason).await;
            return Ok(http::text(StatusCode::BAD_REQUEST, reason));
        }
        Ok(Err(None)) | Err(_) => return Err(Abort),
    };
    let push = Push { door, access, parts, commands };
    let objections = push.commands.objections(push.access.branch.as_deref());
    if !objections.is_empty() {
        return Ok(push.refuse(&objections, body).await);
    }
    drop(objections);
    // A separate task: once the pack is sent, the push is recorded even if git disconnects.
    let (reply, answered) = oneshot::channel();
    tokio::spawn(push.run(head, body, begun + HEAD_TIMEOUT, reply));
    answered.await.map_err(|_| Abort)
}

/// What was read of a push.
struct PushHead {
    bytes: BytesMut,
    /// Where the pack begins.
    pack: usize,
}

// The commands and all bytes read so far. `Err(None)` when the body ended or failed first.
async fn read_head(body: &mut Incoming) -> Result<(Commands, PushHead), Option<&'static str>> {
    let mut bytes = BytesMut::new();
    loop {
        match Commands::read(&bytes).map_err(Some)? {
            // git sends an empty list of commands to probe for permission; no pack may follow it.
            Some((commands, pack)) if commands.commands.is_empty() => {
                return if bytes.len() == pack && body.frame().await.is_none() {
                    Ok((commands, PushHead { bytes, pack }))
                } else {
                    Err(Some("an empty list of commands is followed by data"))
                };
            }
            Some((commands, pack)) => return Ok((commands, PushHead { bytes, pack })),
            None => {}
        }
        let frame = body.frame().await.ok_or(None)?.map_err(|_| None)?;
        bytes.extend_from_slice(&frame.into_data().unwrap_or_default());
    }
}

async fn drain(body: Incoming) {
    let drained = async {
        let (mut chunks, mut count) = (BodyDataStream::new(body), 0);
        while let Some(Ok(chunk)) = chunks.next().await {
            count += chunk.len();
            if count > MAX_DRAINED_BYTES {
                break;
            }
        }
    };
    // On a timeout the response is sent anyway.
    let _ = timeout(DRAIN_TIMEOUT, drained).await;
}

struct Push {
    door: Arc<Door>,
    access: GitAccess,
    parts: Parts,
    commands: Commands,
}

impl Push {
    async fn run(
        self,
        head: PushHead,
        body: Incoming,
        until: Instant,
        reply: oneshot::Sender<Response<Body>>,
    ) {
        let turn = timeout_at(until, self.door.push_turn(&self.access.name)).await;
        let Ok(Some(_turn)) = turn else {
            let objects = |command| {
                let reason = "another push of this session is in progress; try again".to_owned();
                Objection { command, reason }
            };
            let objections: Vec<_> =
                self.commands.commands.first().map(objects).into_iter().collect();
            return drop(reply.send(self.refuse(&objections, body).await));
        };
        // Sending the response fails when git has disconnected; the push counts anyway.
        let (remote, answered) = match self.send(head, body, until).await {
            Ok(sent) => sent,
            Err(refused) => return drop(reply.send(refused)),
        };
        let (sender, body) = http::streamed();
        let headers = filter_headers(answered.headers(), &FROM_REMOTE);
        drop(reply.send(http::response(StatusCode::OK, headers, body)));
        let (mut report, mut recorded) = (Report::of(&self.commands), false);
        let mut chunks = http::upstream_chunks(answered, &remote.secrets());
        while let Some(chunk) = chunks.next().await {
            if let Ok(chunk) = &chunk {
                report.observe(chunk);
            }
            // Recorded before git gets the response, and even when git has disconnected.
            recorded = recorded || self.record(&report, &remote).await;
            drop(sender.send(chunk).await);
        }
    }

    /// Sends the push, if it may be sent.
    async fn send(
        &self,
        mut head: PushHead,
        mut body: Incoming,
        until: Instant,
    ) -> Result<(Remote, reqwest::Response), Response<Body>> {
        let (shared, secrets) = (&self.door.shared, &self.door.policy.secrets);
        let remote = Remote::resolve(shared, &self.access, secrets, true).await?;
        // Git's probe has no command.
        if let Some(lease) = self.lease(&remote) {
            let read = (&mut head.bytes, head.pack);
            let begun = match lease.check(read, &mut body, until).await {
                Ok(update) => lease.begin(update).await,
                Err(reason) => Err(reason),
            };
            if let Err(reason) = begun {
                let objection = Objection { command: lease.command, reason };
                return Err(self.refuse(&[objection], body).await);
            }
        }
        let head = stream::iter([Ok(head.bytes.freeze())]);
        let body = reqwest::Body::wrap_stream(head.chain(BodyDataStream::new(body)));
        let headers = filter_headers(&self.parts.headers, &TO_REMOTE);
        let sent = remote.send(&self.door.shared, GitRequest::Push, headers, Some(body)).await;
        if let (Err(refused), Some(lease)) = (&sent, self.lease(&remote))
            && refused.extensions().get::<NothingTaken>().is_some()
        {
            lease.refused().await;
        }
        Ok((remote, sent?))
    }

    fn lease<'a>(&'a self, remote: &'a Remote) -> Option<Lease<'a>> {
        let (command, branch) = (self.commands.commands.first()?, self.access.branch.as_ref()?);
        Some(Lease { door: &self.door, access: &self.access, branch, command, remote })
    }

    /// Records what the remote reports; false until it does.
    async fn record(&self, report: &Report, remote: &Remote) -> bool {
        let Some(lease) = self.lease(remote) else { return false };
        match report.accepted(&lease.command.reference) {
            None => return false,
            Some(false) => lease.refused().await,
            Some(true) => {
                let event = EventBody::Pushed {
                    repository: self.access.name.clone(),
                    branch: lease.branch.clone(),
                    commit: lease.command.new.clone(),
                };
                self.door.log(event).await;
            }
        }
        true
    }

    /// Logs a refusal, and answers with git's report.
    async fn refuse(&self, objections: &[Objection<'_>], body: Incoming) -> Response<Body> {
        let (first, more) = match objections {
            [only] => (only, String::new()),
            [first, more @ ..] => (first, format!(" (and {} more)", more.len())),
            [] => return http::text(StatusCode::FORBIDDEN, "the push is refused"),
        };
        let reason = format!("{}: {}{more}", first.command.reference, first.reason);
        self.door.log_refused_push(&self.access.name, &reason).await;
        drain(body).await;
        match self.commands.refusal(objections) {
            Some(report) => http::with_type(StatusCode::OK, RESULT_TYPE, report),
            None => http::text(StatusCode::FORBIDDEN, &first.reason),
        }
    }
}
