//! A command with its input behind it: one line of JSON, then what the command reads, as it is and however
//! much it is. `curl -T -` can send it. Plain JSON is taken as well.

use axum::{
    body::{Body, BodyDataStream},
    extract::{FromRequest, Request},
    http::{StatusCode, header},
};
use bytes::BytesMut;
use futures_util::{StreamExt, stream};
use harvest_session::bridge::{Feed, FeedTorn};
use serde::de::DeserializeOwned;

use crate::{
    extract::{self, BODY_PATIENCE, MAX_BODY_BYTES},
    problem::ApiError,
};

/// The type of such a body.
pub(crate) const WITH_INPUT: &str = "application/vnd.harvest.exec";

/// A command, and what it reads if that comes along.
pub(crate) struct Fed<T> {
    pub(crate) command: T,
    pub(crate) input: Option<Feed>,
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Fed<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let kind =
            request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let essence = kind.and_then(|kind| kind.split(';').next()).unwrap_or("").trim();
        if !essence.eq_ignore_ascii_case(WITH_INPUT) {
            let extract::Body(command) = extract::Body::from_request(request, state).await?;
            return Ok(Self { command, input: None });
        }
        let (line, rest) = first_line(request.into_body()).await?;
        Ok(Self { command: extract::parse(&line)?, input: Some(rest) })
    }
}

/// The first line of a body, which must come soon, and the rest of it, which may take its time.
async fn first_line(body: Body) -> Result<(BytesMut, Feed), ApiError> {
    tokio::time::timeout(BODY_PATIENCE, line_of(body)).await.unwrap_or_else(|_| {
        let detail =
            format!("the command's line was not there within {} s", BODY_PATIENCE.as_secs());
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", detail))
    })
}

async fn line_of(body: Body) -> Result<(BytesMut, Feed), ApiError> {
    let mut body = body.into_data_stream();
    let mut line = BytesMut::new();
    let mut searched = 0;
    loop {
        if let Some(end) = line[searched..].iter().position(|byte| *byte == b'\n') {
            let mut rest = line.split_off(searched + end);
            let first = rest.split_off(1);
            return Ok((line, feed(first.to_vec(), body)));
        }
        searched = line.len();
        if searched > MAX_BODY_BYTES {
            let detail = format!("the command's line is longer than {MAX_BODY_BYTES} bytes");
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail));
        }
        match body.next().await {
            Some(Ok(piece)) => line.extend_from_slice(&piece),
            Some(Err(_)) => {
                return Err(ApiError::invalid(
                    "invalid_body",
                    "the body could not be read to its end",
                ));
            }
            // Without an input there need not be a line's end either.
            None => return Ok((line, feed(Vec::new(), body))),
        }
    }
}

fn feed(first: Vec<u8>, rest: BodyDataStream) -> Feed {
    let rest = rest.map(|piece| piece.map(Vec::from).map_err(|_| FeedTorn));
    stream::iter((!first.is_empty()).then_some(Ok(first))).chain(rest).boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(pieces: &[&'static str]) -> (String, String) {
        let pieces: Vec<_> = pieces.iter().map(|piece| Ok::<_, std::io::Error>(*piece)).collect();
        let (line, feed) = first_line(Body::from_stream(stream::iter(pieces))).await.unwrap();
        let rest: Vec<Vec<u8>> = feed.map(|piece| piece.unwrap()).collect().await;
        (String::from_utf8(line.to_vec()).unwrap(), String::from_utf8(rest.concat()).unwrap())
    }

    #[tokio::test]
    async fn the_first_line_is_the_command_whatever_pieces_it_comes_in() {
        let expected = ("{}".to_owned(), "in\nput\n".to_owned());
        assert_eq!(read(&["{}\nin\nput\n"]).await, expected);
        assert_eq!(read(&["{", "}", "\n", "in\n", "put\n"]).await, expected);
        assert_eq!(read(&["{}\n"]).await, ("{}".to_owned(), String::new()));
        assert_eq!(read(&["{}"]).await, ("{}".to_owned(), String::new()));
    }

    #[tokio::test]
    async fn a_line_without_end_is_refused() {
        let pieces = stream::repeat_with(|| Ok::<_, std::io::Error>("x".repeat(64 * 1024)));
        assert_eq!(first_line(Body::from_stream(pieces)).await.err().unwrap().code, "too_large");
    }
}
