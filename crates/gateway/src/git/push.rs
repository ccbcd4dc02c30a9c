//! Pushes: read as far as their commands, judged, and only then begun upstream. A refusal is answered in
//! git's own words and nothing of it reaches the remote.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, stream};
use harvest_proto::EventBody;
use http_body_util::BodyExt;
use hyper::{Response, StatusCode, body::Incoming, header, http::request::Parts};
use tokio::{sync::oneshot, time::timeout};

use super::{
    Errand, PASSED_IN, PASSED_OUT, Remote,
    pktline::{Commands, Head, Report},
    selected,
};
use crate::{
    door::Door,
    http::{self, Body, Cut},
    ledger::GitAccess,
};

const RESULT_TYPE: &str = "application/x-git-receive-pack-result";
// git sends its commands in one piece; only a stuck client takes longer.
const HEAD_LIMIT: Duration = Duration::from_secs(60);
// git reads the answer only after it has sent its pack, so a refused pack is read and thrown away; one
// larger than this is cut off instead.
const MAX_DRAINED_BYTES: usize = 2 << 30;
const DRAIN_LIMIT: Duration = Duration::from_secs(600);

/// Answers a push.
pub(super) async fn answer(
    door: Arc<Door>,
    access: GitAccess,
    parts: Parts,
    mut body: Incoming,
) -> Result<Response<Body>, Cut> {
    if parts.headers.contains_key(header::CONTENT_ENCODING) {
        door.log_refused_push(&access.name, "the push is compressed, so it cannot be judged").await;
        return Ok(http::text(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "a compressed push cannot be judged",
        ));
    }
    let (commands, head) = match timeout(HEAD_LIMIT, read_head(&mut body)).await {
        Ok(Ok(read)) => read,
        Ok(Err(Some(reason))) => {
            door.log_refused_push(&access.name, reason).await;
            return Ok(http::text(StatusCode::BAD_REQUEST, reason));
        }
        Ok(Err(None)) | Err(_) => return Err(Cut),
    };
    let objections = commands.objections(access.branch.as_deref());
    if !objections.is_empty() {
        let first = &objections[0];
        let more = match objections.len() - 1 {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        let reason = format!("{}: {}{more}", first.command.reference(), first.reason);
        door.log_refused_push(&access.name, &reason).await;
        drain(body).await;
        let refusal = commands.refusal(&objections);
        return Ok(match refusal {
            Some(report) => http::with_type(StatusCode::OK, RESULT_TYPE, report),
            None => http::text(StatusCode::FORBIDDEN, &objections[0].reason),
        });
    }
    // A task of its own: once the pack is up, the push is recorded even if git has hung up.
    let (reply, answered) = oneshot::channel();
    let push = Push { door, access, parts, commands };
    tokio::spawn(push.run(head, body, reply));
    answered.await.map_err(|_| Cut)
}

// The commands and all bytes read so far. `Err(None)` when the body ended or broke first.
async fn read_head(body: &mut Incoming) -> Result<(Commands, Bytes), Option<&'static str>> {
    let mut bytes = BytesMut::new();
    loop {
        match Commands::read(&bytes) {
            // Without commands there must be nothing to unpack: git sends this to see whether it may push.
            Head::Whole(commands, length) if commands.commands.is_empty() => {
                return if bytes.len() == length && body.frame().await.is_none() {
                    Ok((commands, bytes.freeze()))
                } else {
                    Err(Some("something follows an empty list of commands"))
                };
            }
            Head::Whole(commands, _) => return Ok((commands, bytes.freeze())),
            Head::Refused(reason) => return Err(Some(reason)),
            Head::Partial => {}
        }
        let frame = body.frame().await.ok_or(None)?.map_err(|_| None)?;
        bytes.extend_from_slice(&frame.into_data().unwrap_or_default());
    }
}

async fn drain(body: Incoming) {
    let drained = async {
        let (mut pieces, mut count) = (http::pieces(body), 0);
        while let Some(Ok(piece)) = pieces.next().await {
            count += piece.len();
            if count > MAX_DRAINED_BYTES {
                break;
            }
        }
    };
    // Too slow or too long: the answer goes out all the same.
    let _ = timeout(DRAIN_LIMIT, drained).await;
}

struct Push {
    door: Arc<Door>,
    access: GitAccess,
    parts: Parts,
    commands: Commands,
}

impl Push {
    async fn run(self, head: Bytes, body: Incoming, reply: oneshot::Sender<Response<Body>>) {
        // Nobody waits for the answer any more when sending it fails; the push counts all the same.
        let answered = match self.send(head, body).await {
            Ok(answered) => answered,
            Err(refused) => return drop(reply.send(refused)),
        };
        let (feed, body) = http::streamed();
        let mut response = Response::new(body);
        *response.headers_mut() = selected(answered.headers(), &PASSED_IN);
        drop(reply.send(response));
        let (mut report, mut logged) = (Report::of(&self.commands), false);
        let mut pieces = answered.bytes_stream();
        while let Some(piece) = pieces.next().await {
            let piece = match piece {
                Ok(piece) => Ok(piece),
                Err(failed) => Err(failed.without_url().into()),
            };
            if let Ok(piece) = &piece {
                report.pass(piece);
            }
            // Recorded before git can know, and even when git no longer listens.
            logged = logged || self.log_if_done(&report).await;
            drop(feed.send(piece).await);
        }
    }

    async fn send(&self, head: Bytes, body: Incoming) -> Result<reqwest::Response, Response<Body>> {
        let remote = Remote::of(&self.door, &self.access).await?;
        let head = stream::iter([Ok(head)]);
        let body = reqwest::Body::wrap_stream(head.chain(http::pieces(body)));
        let headers = selected(&self.parts.headers, &PASSED_OUT);
        remote.ask(&self.door, Errand::Push, headers, Some(body)).await
    }

    async fn log_if_done(&self, report: &Report) -> bool {
        let (Some(command), Some(branch)) = (self.commands.commands.first(), &self.access.branch)
        else {
            return false;
        };
        if report.accepted(command.reference()) != Some(true) {
            return false;
        }
        let event = EventBody::Pushed {
            repository: self.access.name.clone(),
            branch: branch.clone(),
            commit: command.commit().to_owned(),
        };
        self.door.shared.ledger.log(&self.door.pass().session, event).await;
        true
    }
}
