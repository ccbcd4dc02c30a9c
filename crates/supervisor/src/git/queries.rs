//! Git requests that read or write saved trees, and those whose output or input is a stream. All
//! of them run [`program`](super::program).

use std::{future::pending, path::Path, rc::Rc};

use harvest_proto::bridge::{
    Exit, Fault, FaultCode, GitQuery, GitRequest, Reply, StreamId, Truncation,
};
use tokio::sync::watch;

use super::{
    Git, LOCAL_TIMEOUT,
    program::{Job, OBJECTS_MISSING, ROLE},
};
use crate::{
    capture::{self, Captured},
    connection::Connection,
    exec,
    pipes::{discard_output, read_on, read_rest},
    processes::ProcessSpec,
    streams::{Credit, Inbox},
    truncate::Tail,
};

/// The stream of a request: its output or its input.
pub(super) struct GitStream {
    output: Option<(StreamId, Rc<Credit>)>,
    input: Option<(StreamId, Rc<Inbox>)>,
}

impl GitStream {
    pub(super) fn open(connection: &Connection, request: &GitRequest) -> Result<Self, Fault> {
        let (mut output, mut input) = (None, None);
        if let GitRequest::Query { stream, .. } = request {
            output = Some((*stream, connection.open_outgoing(*stream)?));
        } else if let GitRequest::UnpackTree { stream, .. } = request {
            input = Some((*stream, connection.open_incoming(*stream)?));
        }
        Ok(Self { output, input })
    }

    pub(super) fn forget(&self, connection: &Connection) {
        let output = self.output.iter().map(|(stream, _)| *stream);
        let input = self.input.iter().map(|(stream, _)| *stream);
        output.chain(input).for_each(|stream| connection.forget(stream));
    }
}

impl Git<'_> {
    pub(super) async fn save_tree(
        &self,
        checkout: &str,
        against: Option<String>,
    ) -> Result<Reply, Fault> {
        let spec = self.program(checkout, &Job::Save { against });
        let output = finish(capture::run(self.sandbox, spec, LOCAL_TIMEOUT).await?)?;
        // The last line is the program's; git's warnings come before it.
        match output.lines().last().map(serde_json::from_str) {
            Some(Ok(Reply::SavedTree { tree, stat })) if is_object_id(&tree) => {
                Ok(Reply::SavedTree { tree, stat })
            }
            _ => Err(Fault::system(format!("git printed no tree: {output}"))),
        }
    }

    pub(super) async fn query(
        &self,
        connection: &Connection,
        checkout: &str,
        query: GitQuery,
        limit: u64,
        stream: &GitStream,
    ) -> Result<Reply, Fault> {
        let is_missing = || !Path::new(&self.folder(checkout)).join(".git").exists();
        if let (GitQuery::Diff { .. }, Some((stream, _))) = (&query, &stream.output)
            && is_missing()
        {
            connection.end(*stream).await;
            return Ok(Reply::Queried { truncated: None });
        }
        let spec = self.program(checkout, &Job::Query(query));
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let (captured, truncated) = self.run_streamed(connection, spec, limit, stream).await?;
        let truncated = match captured.exit {
            _ if truncated => Some(Truncation::Limit),
            Exit::Timeout => Some(Truncation::Timeout),
            _ => finish(captured).map(|_| None)?,
        };
        Ok(Reply::Queried { truncated })
    }

    pub(super) async fn unpack_tree(
        &self,
        connection: &Connection,
        checkout: &str,
        stream: &GitStream,
    ) -> Result<Reply, Fault> {
        let spec = self.program(checkout, &Job::Unpack);
        finish(self.run_streamed(connection, spec, 0, stream).await?.0)?;
        Ok(Reply::Done)
    }

    pub(super) fn folder(&self, checkout: &str) -> String {
        format!("{}/{checkout}", self.sandbox.workspace())
    }

    pub(super) fn program(&self, checkout: &str, job: &Job) -> ProcessSpec {
        let job = serde_json::to_string(job).expect("a job has only string keys");
        // The launcher runs the same binary, which has no path inside the sandbox.
        let argv = ["/proc/self/exe", ROLE, checkout, &job];
        self.process_spec(argv.map(str::to_owned).into(), &self.folder(checkout))
    }

    // Returns also whether stdout exceeded the limit.
    async fn run_streamed(
        &self,
        connection: &Connection,
        spec: ProcessSpec,
        limit: usize,
        stream: &GitStream,
    ) -> Result<(Captured, bool), Fault> {
        let (input, inbox) = stream.input.clone().unzip();
        let oom_before = self.sandbox.oom.read();
        let (mut child, pipes) = exec::spawn(self.sandbox, spec, input.is_some()).await?;
        let (exit_sender, exited) = watch::channel(false);
        let wait = async {
            let (limit, never) = (Some(LOCAL_TIMEOUT), pending());
            let exit = exec::supervise(self.sandbox, &mut child, limit, never, oom_before).await;
            exit_sender.send_replace(true);
            exit
        };
        let pump = async {
            let Some((stream, credit)) = &stream.output else { return false };
            exec::pump_out(connection, pipes.stdout, (*stream, credit), limit, &exited).await
        };
        let mut tail = Tail::default();
        let (exit, truncated) = tokio::select! {
            ended = async { tokio::join!(wait, pump) } => ended,
            never = read_on(&pipes.stderr, |bytes| tail.push(bytes)) => never,
            never = exec::pump_in(connection, pipes.stdin, input, inbox) => never,
        };
        read_rest(&pipes.stderr, |bytes| tail.push(bytes));
        tokio::task::spawn_local(discard_output(pipes.stderr));
        Ok((Captured { exit, tail: tail.text() }, truncated))
    }
}

// The output of a program that succeeded.
fn finish(captured: Captured) -> Result<String, Fault> {
    let code = match captured.exit {
        Exit::Code(code) if code == i32::from(OBJECTS_MISSING) => FaultCode::NotFound,
        _ => FaultCode::System,
    };
    captured.ok().map_err(|tail| Fault::new(code, tail))
}

/// A full id: SHA-1 or SHA-256.
pub(super) fn is_object_id(id: &str) -> bool {
    matches!(id.len(), 40 | 64) && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}
