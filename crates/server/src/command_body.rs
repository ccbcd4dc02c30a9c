//! Request bodies that carry a command and its standard input: one line of JSON, then the input as
//! raw bytes of any length, which `curl -T -` can send. A plain JSON body has no input.

use axum::{
    body::{Body, BodyDataStream},
    extract::{FromRequest, Request},
    http::StatusCode,
    response::Response,
};
use bytes::BytesMut;
use futures_util::StreamExt;
use harvest_proto::api::ExecRequest;
use harvest_session::{
    bridge::{InputAborted, InputStream},
    sandboxes::{SandboxHandle, check_command},
};
use tokio_util::sync::CancellationToken;

use crate::{
    extract::{self, BODY_TIMEOUT, MAX_BODY_BYTES},
    problem::ApiError,
    stream, validate,
};

/// The media type of a command line followed by input.
const WITH_INPUT: &str = "application/vnd.harvest.exec";

pub(crate) struct CommandWithInput {
    pub(crate) command: ExecRequest,
    pub(crate) input: Option<InputStream>,
}

impl CommandWithInput {
    /// Called before a sandbox is started or resumed for the command.
    pub(crate) fn validate(&self, in_new_sandbox: bool) -> Result<(), ApiError> {
        validate::exec(&self.command)?;
        Ok(check_command(&self.command, in_new_sandbox)?)
    }

    /// Runs the command in a sandbox and responds with its output.
    pub(crate) async fn run(
        self,
        sandbox: SandboxHandle,
        shutdown: CancellationToken,
    ) -> Result<Response, ApiError> {
        let has_input = self.input.is_some();
        let lines = sandbox.exec_lines(self.command, self.input).await?;
        Ok(stream::exec_lines(lines, has_input, shutdown))
    }
}

impl<S: Send + Sync> FromRequest<S> for CommandWithInput {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        if !extract::media_type(request.headers()).eq_ignore_ascii_case(WITH_INPUT) {
            let extract::Body(command) = extract::Body::from_request(request, state).await?;
            return Ok(Self { command, input: None });
        }
        let (line, rest) = first_line(request.into_body()).await?;
        Ok(Self { command: extract::parse(&line)?, input: Some(rest) })
    }
}

/// The first line of a body, which is subject to a timeout, and the rest, which is not.
async fn first_line(body: Body) -> Result<(BytesMut, InputStream), ApiError> {
    tokio::time::timeout(BODY_TIMEOUT, split_line(body)).await.unwrap_or_else(|_| {
        let detail = format!("the command line did not arrive within {} s", BODY_TIMEOUT.as_secs());
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", detail))
    })
}

async fn split_line(body: Body) -> Result<(BytesMut, InputStream), ApiError> {
    let mut body = body.into_data_stream();
    let mut line = BytesMut::new();
    let mut searched = 0;
    loop {
        if let Some(end) = line[searched..].iter().position(|byte| *byte == b'\n') {
            let mut rest = line.split_off(searched + end);
            let first = rest.split_off(1);
            return Ok((line, input_stream(first.to_vec(), body)));
        }
        searched = line.len();
        if searched > MAX_BODY_BYTES {
            let detail = format!("the command line is longer than {MAX_BODY_BYTES} bytes");
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail));
        }
        match body.next().await {
            Some(Ok(chunk)) => line.extend_from_slice(&chunk),
            Some(Err(_)) => {
                return Err(ApiError::invalid("invalid_body", "the body is incomplete"));
            }
            // The newline is optional when there is no input.
            None => return Ok((line, input_stream(Vec::new(), body))),
        }
    }
}

fn input_stream(first: Vec<u8>, rest: BodyDataStream) -> InputStream {
    let rest = rest.map(|chunk| chunk.map(Vec::from).map_err(|_| InputAborted));
    futures_util::stream::iter((!first.is_empty()).then_some(Ok(first))).chain(rest).boxed()
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    async fn read(chunks: &[&'static str]) -> (String, String) {
        let chunks: Vec<_> = chunks.iter().map(|chunk| Ok::<_, std::io::Error>(*chunk)).collect();
        let (line, input) = first_line(Body::from_stream(stream::iter(chunks))).await.unwrap();
        let rest: Vec<Vec<u8>> = input.map(|chunk| chunk.unwrap()).collect().await;
        (String::from_utf8(line.to_vec()).unwrap(), String::from_utf8(rest.concat()).unwrap())
    }

    #[tokio::test]
    async fn first_line_is_the_command_however_chunked() {
        let expected = ("{}".to_owned(), "in\nput\n".to_owned());
        assert_eq!(read(&["{}\nin\nput\n"]).await, expected);
        assert_eq!(read(&["{", "}", "\n", "in\n", "put\n"]).await, expected);
        assert_eq!(read(&["{}\n"]).await, ("{}".to_owned(), String::new()));
        assert_eq!(read(&["{}"]).await, ("{}".to_owned(), String::new()));
    }

    #[tokio::test]
    async fn endless_command_line_is_rejected() {
        let chunks = stream::repeat_with(|| Ok::<_, std::io::Error>("x".repeat(64 * 1024)));
        assert_eq!(first_line(Body::from_stream(chunks)).await.err().unwrap().code, "too_large");
    }
}
